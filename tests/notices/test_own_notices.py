"""`harness run --notices pkg.mod:function`: a user's own notices, right and wrong, and a real agent
that hears them."""

import os
import sys
import threading

import pytest

from harness.core.facts import EpochLeft, NoticeSeen, SnapshotCommitted
from harness.core.world import BadInput
from harness.notices.custom_source import OwnSource, sources_of
from harness.notices.notice import Notice, watch
from harness.notices.sources import detect, places, sigterm_s
from support.nodes import SLOW

KILL = Notice("mine", "kill", "n-1", None)


# ---- what `--notices` names below ----------------------------------------------------------------
class Rack:
    """A source as a user writes it."""

    name, pace_s, errors = "rack", 0.05, 0

    def __init__(self, notices=(), name="rack"):
        self.notices, self.name, self.acknowledged = list(notices), name, []

    def poll(self):
        return self.notices

    def acknowledge(self, notice):
        self.acknowledged.append(notice.id)
        return True

    def close(self):
        pass


def nothing():
    return []


def none():
    return None


def kill():
    return [KILL]


def rack(name="rack", n=1.0):
    made = [Rack([KILL], name if i == 0 else f"{name}{i}") for i in range(int(n))]
    return made[0] if n == 1 else made


def raises():
    raise OSError("no route to the rack")


def number():
    return 7


def hangs():
    threading.Event().wait(30)


def a_list_of_words():
    return ["kill"]


def bad_kind():
    return [Notice("mine", "bogus", "n-1", None)]


def nameless():
    return Rack(name="")


def like_ours():
    return Rack(name="aws")


def without_pace():
    made = Rack()
    made.pace_s = 0
    return made


def half_a_source():
    class Half:
        def poll(self):
            return []

    return Half()


def wants_a_path(path):
    return Rack(name=path)


NOT_A_FUNCTION = 3
HERE = __name__


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("nothing", [f"{HERE}:nothing"]),
        ("none", [f"{HERE}:none"]),
        ("kill", [f"{HERE}:kill"]),
        ("rack", ["rack"]),
        ("Rack", ["rack"]),
        ("rack?n=2&name=r", ["r", "r1"]),
        ("wants_a_path?path=p", ["p"]),
    ],
)
def test_what_a_function_may_return(spec, names):
    assert [s.name for s in sources_of(f"{HERE}:{spec}")] == names


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no.such.module:f", "cannot be imported .* on PYTHONPATH"),
        (f"{HERE}:missing", "cannot be imported"),
        (f"{HERE}:NOT_A_FUNCTION", "wanted a function, found int"),
        (f"{HERE}:raises", "first call failed: OSError: no route to the rack"),
        (f"{HERE}:number", "returned int 7; wanted a source"),
        (f"{HERE}:a_list_of_words", "returned list .*; wanted a source"),
        (f"{HERE}:bad_kind", "its kind is 'bogus'; wanted one of kill, soft, maintenance"),
        (f"{HERE}:nameless", "its name is ''; wanted a word"),
        (f"{HERE}:like_ours", "that of a source of ours"),
        (f"{HERE}:without_pace", "its pace_s is 0; wanted seconds"),
        (f"{HERE}:half_a_source", "returned Half .*; wanted a source"),
        (f"{HERE}:wants_a_path", "missing a required argument"),
        (f"{HERE}:kill?x=3", "unexpected keyword argument 'x'"),
    ],
)
def test_what_is_wrong_is_told_at_the_start(spec, says):
    with pytest.raises(BadInput, match=says):
        detect({}, asked=spec)


def test_a_first_call_that_hangs_is_told():
    with pytest.raises(BadInput, match=r"has not returned within 0\.05 s"):
        sources_of(f"{HERE}:hangs", within_s=0.05)


def test_own_sources_stand_beside_the_others(tmp_path):
    env = {"HARNESS_NOTICE_FILE": str(tmp_path / "notice"), "SLURM_JOB_ID": "1"}
    own = f"{HERE}:kill"
    # alone, as any name does
    assert [s.name for s in detect(env, tmp_path, own)] == [own]
    assert [s.name for s in detect(env, tmp_path, f"auto,{own}")] == ["file", own]
    assert [s.name for s in detect(env, tmp_path, f"file, {own},{HERE}:rack")] == [
        "file",
        own,
        "rack",
    ]
    assert [s.name for s in detect(env, tmp_path, f"none,{own}")] == [own]
    assert places(env, tmp_path, "auto") == places(env, tmp_path) == ["file", "slurm"]
    assert sigterm_s(env, tmp_path, f"auto,{own}") == 30.0
    with pytest.raises(BadInput, match="'rack', which is that of a source of ours"):
        detect(env, tmp_path, f"{HERE}:rack,{HERE}:Rack")
    with pytest.raises(BadInput, match=r"clouds is not known; wanted .* pkg|package\.module"):
        detect(env, tmp_path, f"clouds,{own}")


def test_what_goes_wrong_later_neither_makes_nor_takes_back_a_notice():
    inner = Rack([KILL])
    source = OwnSource(inner)
    (known,) = source.poll()
    assert (known.source, known.id) == ("rack", "n-1")
    wrong = [7], [Notice("rack", "bogus", "x", None)], [Notice("rack", "kill", "x", float("nan"))]
    for n, said in enumerate((*wrong, None, [Notice("rack", "kill", "", None)]), start=1):
        inner.notices = said
        assert source.poll() == [known]
        assert source.errors == n
    inner.notices = []
    assert source.poll() == []
    inner.acknowledge = inner.close = raises
    assert source.acknowledge(known) is False
    source.close()


def test_a_watch_goes_on_over_a_source_that_raises():
    seen, calls = threading.Event(), []

    class Late(Rack):
        def poll(self):
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("not yet")
            return [KILL]

    source = OwnSource(Late())
    watcher = watch([source], lambda told: seen.set())
    assert seen.wait(30)
    watcher.stop()
    assert source.errors == 2


# ---- a real agent --------------------------------------------------------------------------------
MODULE = """
import pathlib
from harness import Notice

def rack(path):
    def poll():
        word = pathlib.Path(path)
        if word.exists():
            return [Notice("", "kill", "the-rack-goes", None, detail="said the rack")]
        return []
    class Source:
        name, pace_s, errors = "rack", 0.1, 0
        def poll(self): return poll()
        def acknowledge(self, notice):
            pathlib.Path(path + ".heard").write_text(notice.id)
            return True
        def close(self): pass
    return Source()
"""


def test_a_node_leaves_at_a_notice_of_the_users_own(nodes, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "my_rack.py").write_text(MODULE)
    word = tmp_path / "word"
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "lib"), *sys.path])}
    nodes.start(*SLOW, env=env, agent=("--notices", f"file,my_rack:rack?path={word}"))
    nodes.until(lambda: nodes.step() >= 10)
    word.touch()
    assert nodes.codes() == [33]
    (notice,) = nodes.facts(NoticeSeen)
    assert (notice.source, notice.notice, notice.id) == ("rack", "kill", "the-rack-goes")
    assert [left.why for left in nodes.facts(EpochLeft)] == ["drained"]
    assert nodes.facts(SnapshotCommitted)[-1].why == "notice"


def test_a_node_whose_source_is_wrong_does_not_start(nodes):
    nodes.start(*SLOW, agent=("--notices", "my_rack_that_is_not_there:f"))
    assert nodes.codes() == [2]
    assert "cannot be imported" in nodes.logs() and "PYTHONPATH" in nodes.logs()
