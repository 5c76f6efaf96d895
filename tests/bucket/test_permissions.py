"""The policies of docs/SECURITY.md allow what each seat really asks of a bucket, and no more than
that: every call of a run on S3 is recorded, by who made it."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from support import buckets
from support.worlds import TRAINER

pytestmark = pytest.mark.proof
DOCS = Path(__file__).parents[2] / "docs" / "design" / "SECURITY.md"
URL = "s3://my-bucket/runs/x"
TASK = """\
name: tiny
workdir: {workdir}
resources: {{use_spot: true, accelerators: L4:1, job_recovery: {{recover_on_exit_codes: [33]}}}}
envs: {{RUN: null, FLAGS: "", AWS_ACCESS_KEY_ID: node}}
run: |
  exec harness run --run "$RUN" --set peer_tier=memory -- {trainer} $FLAGS
"""


def action(method: str, key: str, query: str) -> str:
    """The permission that S3 asks for."""
    if not key:
        return "s3:ListBucketMultipartUploads" if query.startswith("uploads") else "s3:ListBucket"
    if method == "DELETE":
        return "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
    return "s3:GetObject" if method in ("GET", "HEAD") else "s3:PutObject"


def policies() -> dict[str, list[dict]]:
    """Statements of each seat's policy, as the page has them."""
    found = re.findall(r"<!-- policy: (\w+) -->\n```json\n(.*?)```", DOCS.read_text(), re.S)
    return {seat: json.loads(text)["Statement"] for seat, text in found}


def allows(statements: list[dict], wanted: str, key: str) -> bool:
    arn = f"arn:aws:s3:::my-bucket/{key}" if key else "arn:aws:s3:::my-bucket"
    said = False
    for one in statements:
        resources = [one["Resource"]] if isinstance(one["Resource"], str) else one["Resource"]
        named = wanted in one["Action"] and any(
            fnmatchcase(arn, r.replace("BUCKET", "my-bucket").replace("PREFIX", "runs")) for r in resources
        )
        if named and one["Effect"] == "Deny":
            return False
        said = said or named
    return said


def test_every_call_is_allowed_and_every_permission_is_used(tmp_path):
    seen: list[tuple[str, str, str, str]] = []
    (tmp_path / "task.yaml").write_text(TASK.format(workdir=tmp_path, trainer=TRAINER))
    with buckets.moto(seen=seen) as endpoint:

        def harness(who: str, *words: str) -> str:
            environ = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_"))}
            environ |= {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": who,
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1",
                "HOME": str(tmp_path),
            }
            done = subprocess.run(
                [sys.executable, "-m", "harness.cli", *words], env=environ, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        flags = "FLAGS=--total 60 --every 10 --sleep-s 0.02"
        harness("controller", "launch", str(tmp_path / "task.yaml"), "--run", URL, "--nodes", "2:2", "--market", "calm", "--env", flags)
        for words in (("status",), ("prove", "verify"), ("runs", "report", "--json"), ("snapshots", "list"), ("logs",)):
            harness("reader", *words, URL)
    calls: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for who, method, path, query in seen:
        _, bucket, key = (path + "/").split("/", 2)
        key = key.removesuffix("/")
        if bucket == "my-bucket" and who in ("node", "controller", "reader"):
            calls[who][action(method, key, query)].add(key)
    for who, asked in calls.items():
        for what, keys in sorted(asked.items()):
            print(who, what, sorted({k.removeprefix("runs/x/").partition("/")[0] for k in keys}))
    said = policies()
    assert set(said) == set(calls)
    for who, asked in calls.items():
        refused = [(what, key) for what, keys in asked.items() for key in keys if not allows(said[who], what, key)]
        assert not refused, f"{who} needs more than its policy says: {refused[:5]}"
    # nothing is allowed that could be left out; multipart uploads need snapshots of many MB
    granted = {who: {a for s in one if s["Effect"] == "Allow" for a in s["Action"]} for who, one in said.items()}
    rare = {"s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads"}
    assert {who: one - rare for who, one in granted.items()} == {who: set(asked) - rare for who, asked in calls.items()}
