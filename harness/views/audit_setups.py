"""The run's record in an audit: each setup, and each patch, is as it was written.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.bucket.setups import DIFF_NBYTES, SETUP_NBYTES, decode_setup, kept_digest
from harness.core.values import BadObject, digest
from harness.views.audit_rules import RuleBroken
from storage.objects import ObjectStore, get_each


def check_setups(store: ObjectStore, keys: Sequence[str]) -> tuple[int, str]:
    """How many objects of `keys` (under `setup/`) are ours, and what was proved. Raises RuleBroken,
    StoreError."""
    ours = {key: named for key in keys if (named := kept_digest(key))}
    patches: set[str] = set()
    wanted: dict[str, str] = {}  # digest of a patch -> the setup that names it
    for key, data in get_each(store, ours):
        if data is None or len(data) > max(SETUP_NBYTES, DIFF_NBYTES) or digest(data) != ours[key]:
            raise RuleBroken(f"{key}: wanted what its name has the digest of; it was changed")
        if key.endswith(".patch"):
            patches.add(ours[key])
            continue
        try:
            setup = decode_setup(data)
        except BadObject as e:
            raise RuleBroken(f"{key}: wanted a setup, found something else ({e})") from e
        if setup.git.diff_key:
            wanted[setup.git.diff_key] = key
    for name, key in wanted.items():
        if name not in patches:
            raise RuleBroken(f"{key} names a patch that is not there (setup/diff-{name}.patch)")
    return len(ours), "how the run was set up is as it was written"
