"""Exploration of every interleaving of code that uses an object store: a model check whose model is
the code itself.

    # raises TraceViolation, with the trace
    explore({"writer": writer, "pruner": pruner}, objects, check=check, unknowns=1)

An actor is a deterministic function `actor(store, say)`. It is run again from its start for each
new history of replies, up to its next store call. So its state is that history, equal states are
visited once, and any mixture of actors can be tried without threads. A crash needs no special case:
an actor that is never scheduled again is dead, and `check` sees every state. An actor that does not
catch StoreUnavailable ends; any other exception ends it with the word ("raised", what).

Every store call is atomic (see ObjectStore). Up to `unknowns` writes and deletes of one history are
not answered, and take effect at once, never, or at any later time (a request that was still under
way).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.errors import NotFound, StoreUnavailable
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore

SayWord = Callable[[Any], None]
Actor = Callable[[ObjectStore, SayWord], None]
Call = tuple[str, str, tuple[Any, ...]]  # operation, key, the other arguments
Reply = tuple[str, Any]  # ("ok", value) or ("no", class of the error)

WRITES = ("put", "create", "delete")


class TraceViolation(AssertionError):
    """A condition was violated. `trace` has one line per store call, from the start."""

    def __init__(self, why: str, trace: list[str]):
        super().__init__(
            "\n".join([why, *(f"  {i:3d}  {line}" for i, line in enumerate(trace, 1))])
        )
        self.why, self.trace = why, trace


@dataclass(frozen=True)
class ExploredState:
    """One state: the contents of the store, and the words that actors have said so far (actor,
    word), in no particular order.

    settled: every actor has returned, and every call was answered.
    """

    objects: Mapping[str, bytes]
    said: frozenset[tuple[str, Any]]
    settled: bool


@dataclass(frozen=True)
class Explored:
    states: int
    steps: int
    endings: int  # states in which every actor has returned and no call is under way


class _Pause(BaseException):
    """The next store call has no recorded reply yet. Not an Exception, so that actors cannot catch
    it."""


class _Replay:
    """An ObjectStore that gives recorded replies, then pauses."""

    url = "memory://explored"

    def __init__(self, replies: list[Reply]):
        self._replies = replies[::-1]
        self.asked: Call | None = None

    def _do(self, what: str, key: str, *rest: Any) -> Any:
        if not self._replies:
            self.asked = (what, key, rest)
            raise _Pause
        kind, value = self._replies.pop()
        if kind == "no":
            raise value(f"{what} {key}")
        return list(value) if what == "list" else value

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return bytes(self._do("get", key, start, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._do("put", key, bytes(data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return bool(self._do("create", key, bytes(data)))

    def list(self, prefix: str) -> list[str]:
        return list(self._do("list", prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key)

    def size(self, key: str) -> int:
        return int(self._do("size", key))


@dataclass
class _SearchNode:
    """An actor after a history of replies."""

    call: Call | None  # None: it has returned
    said: tuple[Any, ...]  # said since the previous reply
    history: list[Reply]
    after: dict[Reply, int] = field(default_factory=dict)


@dataclass
class _Nodes:
    """The histories of one actor that were visited so far, as a tree."""

    name: str
    actor: Actor
    nodes: list[_SearchNode] = field(default_factory=list)
    words: dict[int, int] = field(default_factory=dict)  # node -> number of words in its history

    def __post_init__(self) -> None:
        self._add([], 0)

    def _add(self, history: list[Reply], heard: int) -> int:
        store, words = _Replay(history), list[Any]()
        call: Call | None = None
        try:
            self.actor(store, words.append)
        except _Pause:
            call = store.asked
        except StoreUnavailable:
            pass  # the actor gives up, as after a crash
        except Exception as e:  # recorded for `check` to judge
            words.append(("raised", f"{type(e).__name__}: {e}"))
        self.nodes.append(_SearchNode(call, tuple(words[heard:]), history))
        self.words[len(self.nodes) - 1] = len(words)
        return len(self.nodes) - 1

    def follow(self, at: int, reply: Reply) -> int:
        node = self.nodes[at]
        if reply not in node.after:
            node.after[reply] = self._add([*node.history, reply], self.words[at])
        return node.after[reply]


@dataclass
class _Buckets:
    """The contents of the store that were visited so far, by number, and the effects of calls on
    them."""

    all: list[dict[str, bytes]] = field(default_factory=list)
    numbers: dict[frozenset[tuple[str, bytes]], int] = field(default_factory=dict)
    done: dict[tuple[int, Call], tuple[int, Reply]] = field(default_factory=dict)

    def number(self, objects: dict[str, bytes]) -> int:
        key = frozenset(objects.items())
        if key not in self.numbers:
            self.numbers[key] = len(self.all)
            self.all.append(objects)
        return self.numbers[key]

    def apply(self, bucket: int, call: Call) -> tuple[int, Reply]:
        if (bucket, call) not in self.done:
            objects = dict(self.all[bucket])
            what, key, rest = call
            reply: Reply
            try:
                value = getattr(MemoryStore("memory://", objects), what)(key, *rest)
                reply = ("ok", tuple(value) if what == "list" else value)
            except NotFound:
                reply = ("no", NotFound)
            self.done[bucket, call] = self.number(objects), reply
        return self.done[bucket, call]


# bucket, nodes, words said, calls under way, unknowns left
_SearchState = tuple[int, tuple[int, ...], frozenset[tuple[str, Any]], tuple[Call, ...], int]
_Step = tuple[_SearchState, str]


def explore(
    actors: Mapping[str, Actor],
    objects: Mapping[str, bytes],
    check: Callable[[ExploredState], str | None],
    *,
    unknowns: int = 0,
    max_states: int = 1_000_000,
) -> Explored:
    """Visit every state that the actors can reach from `objects`, breadth first, so that the trace
    of a violation is a shortest one.

    check(view): None, or what is wrong. Raises TraceViolation; RuntimeError beyond `max_states`
    (then nothing is proven).
    """
    names = list(actors)
    trees = [_Nodes(name, actor) for name, actor in actors.items()]
    buckets = _Buckets()
    said = frozenset((t.name, word) for t in trees for word in t.nodes[0].said)
    start: _SearchState = (buckets.number(dict(objects)), (0,) * len(names), said, (), unknowns)
    came: dict[_SearchState, _Step | None] = {start: None}
    queue, steps, endings = deque([start]), 0, 0
    sound: set[tuple[int, frozenset[tuple[str, Any]], bool]] = set()
    while queue:
        state = queue.popleft()
        bucket, nodes, said, late, left = state
        ended = all(tree.nodes[at].call is None for tree, at in zip(trees, nodes, strict=True))
        view = (bucket, said, ended and left == unknowns)
        if view not in sound:
            why = check(ExploredState(buckets.all[bucket], said, view[2]))
            if why is not None:
                raise TraceViolation(why, _trace(came, state))
            sound.add(view)
        endings += ended and not late
        for label, following in _steps(trees, buckets, state):
            steps += 1
            if following not in came:
                came[following] = (state, label)
                queue.append(following)
        if len(came) > max_states:
            raise RuntimeError(
                f"more than {max_states} states: use fewer actors, calls or unknowns (so far "
                "nothing was wrong)"
            )
    return Explored(len(came), steps, endings)


def _steps(
    trees: list[_Nodes], buckets: _Buckets, state: _SearchState
) -> list[tuple[str, _SearchState]]:
    bucket, nodes, said, late, unknowns = state
    found: list[tuple[str, _SearchState]] = []

    def goes_on(
        i: int, after: int, reply: Reply, late: tuple[Call, ...], left: int, what: str
    ) -> None:
        at = trees[i].follow(nodes[i], reply)
        node = trees[i].nodes[at]
        words = said.union((trees[i].name, w) for w in node.said) if node.said else said
        spoken = "".join(f"; says {w}" for w in node.said)
        found.append(
            (
                f"{trees[i].name}: {what}{spoken}",
                (after, (*nodes[:i], at, *nodes[i + 1 :]), words, late, left),
            )
        )

    for i, tree in enumerate(trees):
        call = tree.nodes[nodes[i]].call
        if call is None:
            continue
        after, reply = buckets.apply(bucket, call)
        text = f"{call[0]} {call[1]}"
        goes_on(i, after, reply, late, unknowns, f"{text} -> {_short(reply)}")
        if unknowns and call[0] in WRITES:
            lost: Reply = ("no", StoreUnavailable)
            goes_on(i, after, lost, late, unknowns - 1, f"{text} -> done, not answered")
            # if it stays under way forever, it never took effect
            goes_on(
                i, bucket, lost, (*late, call), unknowns - 1, f"{text} -> not answered, on its way"
            )
    for i, call in enumerate(late):
        after, _ = buckets.apply(bucket, call)
        found.append(
            (f"late: {call[0]} {call[1]}", (after, nodes, said, late[:i] + late[i + 1 :], unknowns))
        )
    return found


def _short(reply: Reply) -> str:
    kind, value = reply
    if kind == "no":
        return str(value.__name__)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return f"{len(value)} keys" if isinstance(value, tuple) else str(value)


def _trace(came: Mapping[_SearchState, _Step | None], state: _SearchState) -> list[str]:
    lines: list[str] = []
    while (step := came[state]) is not None:
        state, label = step
        lines.append(label)
    return lines[::-1]
