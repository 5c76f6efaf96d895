"""Versions of this code that meet in one run: who speaks another protocol is refused, and harms
nobody. Members here are real; what a version speaks is `values.PROTOCOL`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import Epoch, Identity, Member, Term, epoch_key, term_key
from harness.core.decoding import NewerProtocol
from harness.core.facts import AgentEnded, EpochStarted, Unreadable, Warned
from harness.core.world import REFUSED, Fenced, WrongProtocol
from harness.rendezvous.membership import PeerHeartbeats
from harness.rendezvous.peer_heartbeats import PeerStatus
from harness.rendezvous.rendezvous import Rendezvous
from harness.uploader.senders import fence
from storage.snapshots.manifest import Ref
from storage.stores.folder_store import MemoryStore
from storage.stores.store_urls import open_store
from support.clock import PlayedClock, speaking
from support.worlds import TRAINER, until

pytestmark = pytest.mark.proof


class Deaf(PeerHeartbeats):
    """No lines: all that is known comes from the bucket."""

    def follow(self, members, passing=False):
        pass

    def heard(self, name):
        return PeerStatus()

    def all_up(self):
        return False

    def knocked(self):
        return False

    def tell(self, record):
        pass


class Mixed:
    """Members of several versions on one store, and one clock that the test moves."""

    def __init__(self):
        self.store, self.now, self.speaks = MemoryStore("memory://mixed", {}), 0.0, {}

    def member(self, name: str, protocol: int, attempt: int = 1, state: str = "ready"):
        with speaking(protocol):
            me = Member(name, state, 0, "10.0.0.1", 1, 2, nproc=1, attempt=attempt)
            r = Rendezvous(self.store, me, Deaf(), join_window_s=0.0, monotonic=lambda: self.now)
            r.say()
        self.speaks[r] = protocol
        return r

    def do(self, r, what: str, *args, **more):
        with speaking(self.speaks[r]):
            return getattr(r, what)(*args, **more)

    def pass_s(self, seconds: float, *alive) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for r in alive:
                self.do(r, "say")

    def enter(self, *members) -> Epoch:
        """They form the next epoch and are in it."""
        epoch = None
        for _ in range(20):
            for r in members:
                epoch = self.do(r, "try_form", None)
                if epoch is not None:
                    self.do(r, "say", state="in", epoch=epoch.epoch)
            if all(r.me.state == "in" for r in members):
                return epoch
            self.pass_s(1, *members)
        raise AssertionError("no epoch")


@pytest.fixture
def mixed():
    return Mixed()


@pytest.mark.parametrize(("run", "newcomer"), [(2, 1), (1, 2)], ids=["N-1 in N", "N+1 in N"])
def test_a_newcomer_of_another_protocol_is_refused_and_harms_nobody(mixed, run, newcomer):
    a, b = mixed.member("a", run), mixed.member("b", run, attempt=2)
    first = mixed.enter(a, b)
    c = mixed.member("c", newcomer, attempt=3)
    words = ""
    for _ in range(10):
        try:
            mixed.do(c, "try_form", None)
        except WrongProtocol as e:
            words = str(e)
        mixed.pass_s(1, a, b, c)
    assert "memory://mixed" in words and "install the version" in words
    assert f"protocol {run}" in words and str(newcomer) in words
    for r in (a, b):  # nobody lets it in, or ends an epoch for it
        assert mixed.do(r, "newest") == first
        assert mixed.do(r, "waiting", first, mixed.do(r, "members")) == []
    mixed.do(c, "leave", end="")
    assert mixed.store.list("rdzv/epochs/") == [epoch_key(1)]


def test_a_newcomer_does_not_say_that_it_is_ready_before_it_is_admitted(mixed):
    """Members of the version before protocols had numbers would take it for one of theirs."""
    a = mixed.member("a", 1)
    mixed.enter(a)
    c = mixed.member("c", 2, attempt=2, state="warming")
    assert mixed.do(c, "admitted") is False  # is anybody of that epoch alive? Not known yet
    mixed.pass_s(2, a)
    with pytest.raises(WrongProtocol, match="stop the run"):
        mixed.do(c, "admitted")


def test_a_newer_version_takes_over_from_the_dead(mixed):
    mixed.enter(mixed.member("a", 1))
    c = mixed.member("c", 2, attempt=2)
    for _ in range(12):
        assert mixed.store.list("rdzv/epochs/") == [epoch_key(1)]
        if epoch := mixed.do(c, "try_form", None):
            break
        mixed.pass_s(1, c)
    assert (epoch.epoch, epoch.members, epoch.protocol) == (2, ("c",), 2)
    assert json.loads(mixed.store.get(epoch_key(2)))["protocol"] == 2


def test_an_epoch_of_a_newer_version_ends_the_part_of_an_older_one(mixed):
    """Those who train on, when somebody took them for dead and began with a newer version."""
    a = mixed.member("a", 1)
    mixed.enter(a)
    with speaking(2):
        newer = Epoch(2, ("z",), (1,), (1.0,), "10.0.0.9", 1, "start")
        mixed.store.create(epoch_key(2), newer.encode())
    with pytest.raises(WrongProtocol, match="of protocol 2, this code reads up to 1"):
        mixed.do(a, "newest")
    with pytest.raises(Fenced, match="is over"):  # and what it has made is not committed
        fence(mixed.store)(Ref(epoch=1, step=9))


@pytest.mark.parametrize("body", [{"protocol": 3}, {"protocol": 2, "epoch": "two", "x": [1]}])
def test_a_run_of_a_newer_version_is_not_begun_anew(mixed, body):
    """Nobody is there any more, and its epoch makes no sense to us: it says what it is of."""
    mixed.store.put(epoch_key(1), json.dumps(body).encode())
    a = mixed.member("a", 1)
    with pytest.raises(WrongProtocol, match=f"protocol {body['protocol']}, this code reads up to"):
        mixed.do(a, "try_form", None)
    assert mixed.store.list("rdzv/epochs/") == [epoch_key(1)]


def test_an_epoch_that_an_older_node_began_beside_ours_is_passed_over(mixed, capsys):
    """The version before protocols had numbers cannot be told to keep away."""
    a = mixed.member("a", 2)
    first = mixed.enter(a)
    with speaking(1):
        other = Epoch(2, ("a", "old"), (1, 1), (1.0, 1.0), "10.0.0.9", 1, "grow")
        mixed.store.create(epoch_key(2), other.encode())
    assert mixed.do(a, "newest") == first
    assert "passed over: it is of protocol 1" in capsys.readouterr().out
    mixed.do(a, "say", state="ready", end="resize")
    assert mixed.enter(a).epoch == 3


def test_what_has_no_number_is_of_protocol_1():
    said = Member("m", "ready", 0, "10.0.0.1", 1, 2, nproc=1)
    assert b"protocol" not in said.encode() and b"protocol" not in Term("h").encode()
    with speaking(2):
        assert Member.decode(said.encode()).protocol == 1
        assert Member("m", "ready", 0, "x", 1, 2, nproc=1).protocol == 2
    epoch = Epoch(1, ("m",), (1,), (1.0,), "x", 1, "start", protocol=1)
    assert b"protocol" not in epoch.encode() and Epoch.decode(epoch.encode()) == epoch


def test_facts_of_a_newer_version_are_told_and_the_rest_is_read():
    store = MemoryStore("memory://facts", {})
    with speaking(2):
        newer = Journal(store, "worker-e000002-x", lambda: 2.0)
        newer.record(Warned(1, 2, "it means something else now"))
        newer.flush()
    ours = Journal(store, "worker-e000001-x", lambda: 1.0)
    ours.record(Warned(1, 1, "as ever"))
    ours.flush()
    unread, as_ever = (s.fact for s in read_facts(store))  # it has no time that we can read
    assert as_ever == Warned(1, 1, "as ever") and isinstance(unread, Unreadable)
    assert "protocol 2, this code reads up to 1; update" in unread.why
    with speaking(2):
        assert [s.fact.what for s in read_facts(store)] == [
            "as ever",
            "it means something else now",
        ]


def test_a_run_of_a_newer_version_is_refused_by_its_identity():
    assert Identity.decode(b'{"version":2,"seed":1}').seed == 1
    for body in (b'{"version":3,"seed":1}', b'{"version":1,"protocol":2}'):
        with pytest.raises(NewerProtocol, match="update the package here"):
            Identity.decode(body)


def test_a_controller_does_not_lead_a_run_of_a_newer_version():
    store = MemoryStore("memory://lease", {})
    with speaking(2):
        newer = Lease(store, PlayedClock(), "newer")
        newer.acquire()
        newer.release()
    with pytest.raises(Fenced, match=r"newer version of this code .*protocol 2.*update"):
        Lease(store, PlayedClock(), "older").acquire()
    assert store.list("lease/000002") == []
    store.put(term_key(1), b'{"protocol":2,"holder":["not","text"]}')
    with pytest.raises(Fenced, match="protocol 2"):
        Lease(store, PlayedClock(), "older").acquire()


# ---- with real processes -------------------------------------------------------------------------
NEWER = "from harness.core import decoding as values\nvalues.PROTOCOL = 2\n"


@pytest.mark.parametrize(("run", "newcomer"), [(2, 1), (1, 2)], ids=["N-1 in N", "N+1 in N"])
def test_an_agent_of_another_version_ends_with_its_own_code(tmp_path: Path, run, newcomer):
    """The run's node trains on, in its one epoch, to the end."""
    (tmp_path / "sitecustomize.py").write_text(NEWER)
    url, agents = str(tmp_path / "run"), []

    def start(protocol: int) -> subprocess.Popen:
        n = len(agents) + 1
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_"))}
        if protocol == 2:
            env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
        env |= {"HARNESS_NODE_DIR": str(tmp_path / f"node{n}"), "HARNESS_ATTEMPT": str(n)}
        script = [TRAINER, "--total", "150", "--every", "10", "--sleep-s", "0.06"]
        script += ["--go", str(tmp_path / "go")]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "harness.cli", "run", "--run", url, "--", *script],
                env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )
        )  # fmt: skip
        return agents[-1]

    try:
        first = start(run)
        until(lambda: Path(url, "rdzv/epochs/000001.json").exists(), within_s=200)
        second = start(newcomer)
        said = second.communicate(timeout=200)[0]
        assert first.poll() is None
        (tmp_path / "go").touch()
        assert second.returncode == REFUSED == 38
        assert "install the version" in said and f"protocol {run}" in said
        assert first.wait(200) == 0, first.communicate()[0]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    with speaking(2):
        facts = [s.fact for s in read_facts(open_store(url))]
    assert [f.reason for f in facts if isinstance(f, EpochStarted)] == ["start"]
    ended = {f.exit_code: f.reason for f in facts if isinstance(f, AgentEnded)}
    assert set(ended) == {0, REFUSED} and "protocol" in ended[REFUSED]
