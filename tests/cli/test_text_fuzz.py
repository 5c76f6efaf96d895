"""Texts that come from outside of a run: whatever is in them, each reader gives a value or its one
error, in less than a second. (Objects of a bucket: test_layout.py; wires: test_wire_fuzz.py.)"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.agent import instance_price
from harness.cli import common
from harness.core import signing, user_functions
from harness.core.flags import StepsAsked
from harness.core.input_files import yaml_given
from harness.core.masking import masked_text
from harness.core.world import BadInput
from harness.local import spot_schedule
from harness.notices import aws, kubernetes
from harness.notices.notice import ANSWERLESS
from harness.planner.market_history import MarketHistory
from harness.planner.trace_formats import TraceAsked, read, read_market

LONGEST_S = 1.0  # of this process's own time, so that a busy machine fails nothing
EXAMPLES = 50
BAD, WRONG = (BadInput,), (ValueError,)


@dataclass(frozen=True)
class TextReader:
    """`errors`: all that it may raise. `real`: texts as they are."""

    name: str
    read: Callable[[str], Any]
    errors: tuple[type[Exception], ...]
    real: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def given_yaml(text: str) -> Any:
    path = FOLDER / "given.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    return yaml_given(path, "a task")


def catalog_rows(text: str) -> Any:
    folder = FOLDER / ".sky" / "catalogs" / "v8" / "aws"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vms.csv").write_bytes(text.encode(errors="surrogatepass"))
    return instance_price.catalog_price(FOLDER, SHAPE)


FOLDER = Path()
SHAPE = instance_price.Shape(
    cloud="aws", region="us-east-1", zones=("us-east-1a",), instance_type="p5.48xlarge", spot=True,
    accelerators="H100:8",
)
TRACES = (
    '{"metadata": {"gap_seconds": 300, "start_time": "2022-10-26T01:00:00"}, "data": [1, 0, 3], "prices": [1, 2, 3]}',
    '{"metadata": {"gap_seconds": 600}, "data": [0, 1, 1]}',
    "60000,add,a\n60000,add,b\n180000,remove,a\n300000,add,c\n",
    '["add", 60000, {"nodes": ["a"]}]\n["remove", 180000, {"nodes": ["a"], "duration": 5}]\n',
    "2021-12-10, 13:07:00, 80\n2021-12-10, 13:09:00, 80\n2021-12-10, 13:11:00, 75\n",
    "0,4\n60,3\n120,5\n", "time,zone,nodes,usd_per_h\n0,a,1,0.5\n300,a,0,0.6\n600,a,2,0.5\n",
)  # fmt: skip
CATALOG = (
    "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone\n"
    "p5.48xlarge,192,2048,H100,8,55.0,19.5,us-east-1,us-east-1a\n"
    "p5.48xlarge,192,2048,H100,8,55.0,,us-east-1,us-east-1b\n"
)
READERS = [
    TextReader("trace", lambda t: read(t, "a.txt"), BAD, TRACES),
    TextReader("trace with units", lambda t: read(t, "a.txt", TraceAsked("preempted", "a", 60.0, "hours")), BAD, TRACES),
    TextReader("traces as a market", lambda t: read_market({"x/a.csv": t, "x/b.csv": TRACES[0]}), BAD, TRACES),
    TextReader("trace for the local cloud", lambda t: spot_schedule.from_trace(t, spec="x", max_nodes=4), BAD, TRACES[5:]),
    TextReader("market", lambda t: spot_schedule.parse(t, max_nodes=3, read=lambda path: TRACES[5]), BAD, ("seed:7", "calm", "a@60")),
    TextReader("history", MarketHistory.read, (), ('{"offer": "aws/x", "run": "r", "from_s": 1.0, "until_s": 5.0}',)),
    TextReader("call", lambda t: user_functions.parse("--policy", t), BAD, ("at_most(best_value, usd_per_h=2)", "spread(a, b(c, d=1))")),
    TextReader("dotted path", lambda t: user_functions.options_of("--policy", t), BAD, ("a=1&b=two&c=3.5",)),
    TextReader("steps", StepsAsked.parse, WRONG, ("20:23", "7")),
    TextReader("key", lambda t: signing.key_of(t, "--key"), BAD, ("hsk_" + "0a" * 32, "-----BEGIN PUBLIC KEY-----\nMCow\n")),
    TextReader("nodes", common.node_range, WRONG, ("1:4", "3")),
    TextReader("worlds", common.worlds, WRONG, ("1,2,4",)),
    TextReader("ranks of a copy", lambda t: common.replica_ranks({"HARNESS_REPLICA_RANKS": t}), BAD, ("2",)),
    TextReader("duration", common.duration_text, WRONG, ("36h", "1.5d")),
    TextReader("moment", common.when, WRONG, ("2026-11-22T10:00", "-3h")),
    TextReader("address", common.prometheus_address, WRONG, ("9100", "[::1]:9100")),
    TextReader("task", given_yaml, BAD, ("name: x\nenvs: {A: 1}\nrun: |\n  python x\n", "a: &a [1, 2]\nb: *a\n")),
    TextReader("catalog", catalog_rows, (), (CATALOG,)),
    TextReader("prices with the task", lambda t: instance_price.offered(t, SHAPE), (), ("aws/us-east-1/us-east-1a/p5.48xlarge=19.5/55",)),
    TextReader("accelerators", instance_price.accelerators_of, (), ("H100:8",)),
    TextReader("notice of EC2", aws.interruption, ANSWERLESS, ('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}',)),
    TextReader("rebalancing of EC2", aws.rebalance, ANSWERLESS, ('{"noticeTime": "2026-01-01T00:00:00Z"}',)),
    TextReader("maintenance of EC2", aws.maintenance, ANSWERLESS, ('[{"EventId": "e", "NotBefore": "21 Jan 2026 09:00:43 GMT"}]',)),
    TextReader("pod", kubernetes.pod_deletion, ANSWERLESS, ('{"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "uid": "u"}}',)),
    TextReader("node", kubernetes.node_taints, ANSWERLESS, ('{"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service"}]}}',)),
    TextReader("line of a log", masked_text, (), ("my_token = 'a1b2c3d4e5f6g7' https://a:b@h/?sig=abcdef", "-----BEGIN RSA PRIVATE KEY-----")),
]  # fmt: skip
NASTY = st.sampled_from(
    ["", "\0", "\ufeff", "\ud800", "\u202e", "nan", "inf", "-1", "1e999", "9" * 5000, "-0", "\r", "\n\n", '"', "'",
     ",", ",,,", ";", "(" * 5000, "[" * 5000, "{" * 5000, ")", "a" * 200_000, "=", "&", "*a", "&a ", "<<: *a", "!!python/object:os.system ",
     "0x10", "1_000", "٣", "²", "null", "true", "{}", "[]", "%s", "../", "\\", "\t", ":", "@", "@0", "@nan", "#", "-" * 3000,
     "2026-13-45", "0000-00-00", "9999-12-31T23:59:59Z", "1e15", "1e-300", "1e300", str(2**63), str(10**40)]
)  # fmt: skip
PIECES = NASTY | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)


@st.composite
def texts(draw: st.DrawFn, real: tuple[str, ...]) -> str:
    """A real one with a few changes, or anything."""
    if draw(st.integers(0, 4)) == 0:
        return "".join(draw(st.lists(PIECES, max_size=5)))
    text = draw(st.sampled_from(real))
    for _ in range(draw(st.integers(1, 3))):
        at, cut = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
        text = text[:at] + draw(PIECES) + text[at + cut :]
    return text * draw(st.sampled_from((1, 1, 1, 2, 50)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_text_fuzz.FOLDER", tmp_path)


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_what_is_real_is_read_and_anything_else_is_a_value_or_the_one_error(
    reader: TextReader,
) -> None:
    for text in reader.real:
        with contextlib.suppress(*reader.errors):
            reader.read(text)

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(texts(reader.real))
    def check(text: str) -> None:
        began_s, said = time.process_time(), ""
        try:
            reader.read(text)
        except reader.errors as e:
            said = str(e)
        assert len(said) < 4000, "a clear error is short"
        assert time.process_time() - began_s < LONGEST_S

    check()
