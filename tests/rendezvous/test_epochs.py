"""A model check of the rendezvous whose model is the code itself: every interleaving of its store
calls (tests/support/interleavings.py), with members that stop anywhere, members that are taken for dead though
they live, and writes whose outcome is unknown.

Lines are down here, so all that is known comes from the bucket; and time passes so quickly that
everybody's turn has always come.
"""

import json
from dataclasses import asdict, replace

import pytest

from harness.bucket.layout import EPOCHS, Epoch, Member, epoch_key
from harness.rendezvous.membership import Membership, PeerHeartbeats
from harness.rendezvous.peer_heartbeats import PeerStatus
from harness.rendezvous.rendezvous import Rendezvous
from storage.errors import NotFound
from storage.stores.folder_store import MemoryStore
from support.interleavings import TraceViolation, explore

DOUBTED = "doubted"  # an object that names who is taken for dead; whoever looks around reads it


class Quick:
    """A clock on which an hour passes between two looks."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 3600.0
        return self.now


class Doubts(PeerHeartbeats):
    """No line is up; whether a member's machine refuses is what the environment says, if there
    is any."""

    def __init__(self, store, any_doubt):
        self.store, self.names, self.any_doubt = store, None, any_doubt

    def heard(self, name):
        if self.names is None:
            try:
                self.names = json.loads(self.store.get(DOUBTED)) if self.any_doubt else []
            except NotFound:
                self.names = []
        return PeerStatus(refused=name in self.names, seen=True)

    def follow(self, members, passing=False):
        self.names = None  # the end of a look

    def all_up(self):
        return False

    def knocked(self):
        return False

    def tell(self, record):
        pass


def join(store, name, kind=Rendezvous, any_doubt=True):
    me = Member(name, "ready", 0, "10.0.0.1", 1, 1, nproc=1, attempt=0)
    return kind(store, me, Doubts(store, any_doubt), join_window_s=0.0, monotonic=Quick())


def member(name, looks, kind=Rendezvous, already=None, any_doubt=False, away_after=None):
    """Looks around so often; trains in each epoch that it enters, then leaves it. `already`: it
    is in this epoch at the start. `away_after`: it goes away once, after so many looks."""

    def train(r, say, epoch):
        say(("trains", epoch.epoch, epoch.members))
        say(("left", epoch.epoch))
        r.say(state="ready")

    def run(store, say):
        r = join(store, name, kind, any_doubt)
        if already:
            r.me, r._newest = replace(r.me, state="in", epoch=already.epoch, beat=2), already
            train(r, say, already)
        else:
            r.say()
        for i in range(looks):
            if i == away_after:
                say(("withdraws", r.me.withdrawals, r.me.epoch))
                r.say(state="away", withdrawals=r.me.withdrawals + 1)
            epoch = r.try_form(None)
            if epoch is not None:
                r.say(state="in", epoch=epoch.epoch)
                train(r, say, epoch)

    return run


def doubt(*names):
    """The environment: at some time these are taken for dead, whether they are or not."""

    def run(store, say):
        store.put(DOUBTED, json.dumps(names).encode())

    return run


class Checker:
    """What must hold in every state."""

    def __init__(self, names, kind=Rendezvous):
        self.names, self.kind, self.lively = names, kind, {}

    def __call__(self, view):
        epochs = {
            int(k.removeprefix(EPOCHS)[:6]): json.loads(v)
            for k, v in view.objects.items()
            if k.startswith(EPOCHS)
        }
        if sorted(epochs) != list(range(1, len(epochs) + 1)):
            return f"epochs {sorted(epochs)} have a gap"
        doubted = json.loads(view.objects.get(DOUBTED, b"[]"))
        for who, word in view.said:
            if word[0] == "raised":
                return f"{who}: {word[1]}"
            if word[0] == "trains" and list(word[2]) != epochs[word[1]]["members"]:
                return f"{who} trains in another epoch {word[1]} than the bucket's"
            if word[0] == "trains" and who not in word[2]:
                return f"{who} trains in epoch {word[1]}, which does not name it"
        for n, epoch in epochs.items():
            named = dict(zip(epoch["members"], epoch["withdrawals"], strict=False))
            withdrew = {
                who: word[2]  # the last epoch that it took part in
                for who, word in view.said
                if word[0] == "withdraws" and word[1] == named.get(who)
            }
            staying = [
                m
                for m in epoch["members"]
                if m not in doubted and (m, ("left", n)) not in view.said and m not in withdrew
            ]
            for m, before in withdrew.items():
                if before < n and (m, ("trains", n, tuple(epoch["members"]))) in view.said:
                    return f"{m} trains in epoch {n}, from which it has withdrawn"
            if n + 1 in epochs and staying:
                return (
                    f"epoch {n + 1} exists, but {staying} of epoch {n} have neither left it nor "
                    "been taken for dead"
                )
        return self.dead_end(view.objects)

    def dead_end(self, objects):
        """Should everybody die now, a newcomer must come to train."""
        key = frozenset(objects.items())
        if key not in self.lively:
            store = MemoryStore("memory://", {**objects, DOUBTED: json.dumps(self.names).encode()})
            r = join(store, "newcomer", self.kind)
            r.say()
            epoch = next((e for e in (r.try_form(None) for _ in range(6)) if e is not None), None)
            self.lively[key] = epoch is not None and epoch.members == ("newcomer",)
        return (
            None
            if self.lively[key]
            else "a newcomer finds everybody dead and does not come to train"
        )


def world(*names):
    """The bucket of an epoch 1 that these are in, and the epoch."""
    epoch = Epoch(1, names, (1,) * len(names), (1.0,) * len(names), "10.0.0.1", 1, "start")
    objects = {epoch_key(1): epoch.encode()}
    for n in names:
        objects[f"rdzv/members/{n}.json"] = json.dumps(
            asdict(Member(n, "in", 1, "10.0.0.1", 1, 1, nproc=1, attempt=0, beat=2))
        ).encode()
    return objects, epoch


def test_three_that_start_together():
    """Whatever the order of their calls: one object per epoch, and whoever trains is named in
    it."""
    seen = explore(
        {"a": member("a", 2), "b": member("b", 1), "c": member("c", 1)}, {}, Checker("abc")
    )
    print(seen)
    assert seen.endings > 0


def test_a_world_that_changes_while_somebody_joins():
    objects, one = world("a", "b")
    actors = {
        "a": member("a", 2, already=one),
        "b": member("b", 1, already=one),
        "c": member("c", 1),
    }
    seen = explore(actors, objects, Checker("abc"))
    print(seen)
    assert seen.endings > 0


@pytest.mark.parametrize("unknowns", [0, 1])
def test_one_that_lives_is_taken_for_dead(unknowns):
    """It may train on in an epoch that is over; what it would commit then is refused (tests of
    the fence: test_upload.py)."""
    objects, one = world("a", "b")
    actors = {
        "a": member("a", 2, already=one, any_doubt=True),
        "b": member("b", 2, already=one),
        "doubt": doubt("b"),
    }
    seen = explore(actors, objects, Checker("ab"), unknowns=unknowns)
    print(seen)
    assert seen.endings > 0


def test_unknown_outcomes():
    seen = explore({"a": member("a", 2), "b": member("b", 2)}, {}, Checker("ab"), unknowns=1)
    print(seen)
    assert seen.endings > 0


def test_one_goes_away_and_comes_back():
    """Whatever its bucket last told it: it never enters what named it before it went, and nobody
    waits for it."""
    actors = {"a": member("a", 2), "b": member("b", 3, away_after=1)}
    seen = explore(actors, {}, Checker("ab"))
    print(seen)
    assert seen.endings > 0


class Stubborn(Rendezvous):
    """Broken: enters what named it before it went away."""

    def _names_us(self, last):
        return self.me.member in last.members and last.epoch > self.me.epoch


def test_the_check_finds_one_that_enters_what_it_withdrew_from():
    actors = {"a": member("a", 2, Stubborn), "b": member("b", 3, Stubborn, away_after=1)}
    with pytest.raises(TraceViolation, match=r"withdrawn|neither left it nor"):
        explore(actors, {}, Checker("ab"))


class Puts(Rendezvous):
    """Broken: an epoch is written over another."""

    def try_form(self, max_world):
        real, self.store = self.store, _Overwriting(self.store)
        try:
            return super().try_form(max_world)
        finally:
            self.store = real


class _Overwriting:
    def __init__(self, store):
        self._store = store

    def create(self, key, data):
        self._store.put(key, data)
        return True

    def __getattr__(self, name):
        return getattr(self._store, name)


class Hasty(Rendezvous):
    """Broken: who is ready has left, whatever epoch it has seen."""

    def _has_left(self, m, epoch):
        return m.state == "ready"


class Intruder(Rendezvous):
    """Broken: any new epoch will do."""

    def try_form(self, max_world):
        last = self.newest()
        return last if last.epoch > self.me.epoch else super().try_form(max_world)


class Trusting(Membership):
    """Broken: nobody is ever found dead."""

    def _judge(self, name, now):
        found = super()._judge(name, now)
        return self.seen[name].member if found is not None else None


class Loyal(Rendezvous):
    """Broken: see `Trusting`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.others.__class__ = Trusting


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Puts, "than the bucket's"),
        (Hasty, "neither left it nor"),
        (Intruder, "does not name it"),
        (Loyal, "a newcomer finds"),
    ],
)
def test_the_check_finds_what_is_broken(kind, says):
    with pytest.raises(TraceViolation, match=says):
        explore(
            {n: member(n, 2, kind) for n in "ab"},
            {},
            Checker("ab", kind if kind is Loyal else Rendezvous),
        )
