"""Names of a module's tensors, without those of modules that only wrap others.

Pure.
"""

from __future__ import annotations

# where torch.compile and torch's checkpoint_wrapper keep the module that they stand for
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """As it would be without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
