"""Tamperings: what somebody who may write to a run's bucket can do to it, with every hash made anew
that an outsider can make."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict

from harness.bucket.archive import Compactor, segments
from harness.bucket.journal import Journal
from harness.bucket.layout import epoch_key, term_key
from harness.bucket.signed_heads import SignedStore, Signer, sign_off
from harness.core import facts
from harness.core import step_records as rec
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import PARTS, Link, Manifest, PartList, Ref, chunk_hash
from storage.snapshots.snapshot_keys import list_key, manifest_key
from storage.snapshots.tensor_hash import combined, weights_sum
from storage.stores.folder_store import MemoryStore
from support.truerun import OFFER, TrueRun


class TellingRun(TrueRun):
    """A true run whose manifests are a chain, and whose commits are told as an uploader does."""

    def __init__(self, key=None, **more):
        if key is not None:
            plain = more.pop("store", None) or MemoryStore("memory://bucket/true-run", {})
            more["store"] = SignedStore(plain, Signer(plain, key, "all", lambda: 1e6))
        super().__init__(**more)
        self.store.create(term_key(1), b"{}")  # somebody leads it
        self.controller.record(facts.PricesSeen({OFFER.name: OFFER.usd_per_h}))
        self.controller.flush()
        self.uploader = Journal(self.store, "uploader-m0001-aa", lambda: self.t)

    def snapshot(self, unsaved, world, final=False):
        super().snapshot(unsaved, world, final)
        m = self.snapshots.load(self.parent)
        weights = str(m.data.get("weights") or "")
        self.uploader.record(
            facts.SnapshotCommitted(m.step, m.epoch, m.nbytes, 0.1, 0.2, "interval", self.t, weights)
        )
        self.uploader.flush()


    def end(self, outcome="done", **changes):
        super().end(outcome, **changes)
        sign_off(self.store)
        return self


def small_run(key=None):
    """Three epochs, two resizes, writers of each seat; ended."""
    run = TellingRun(key).train(7, world=2).train(12, world=3).train(20, world=1, final=True)
    return run.end()


def copied(store):
    into = MemoryStore("memory://bucket/true-run", {})
    for key in store.list(""):
        into.put(key, store.get(key))
    return into


def restored(store, old):
    """The bucket as it was."""
    for key in store.list(""):
        store.delete(key)
    for key in old.list(""):
        store.put(key, old.get(key))


# ---- facts ---------------------------------------------------------------------------------------
def edit_facts(store, writer, edit):
    """`edit(body)` changes a line's body; its chain is made anew, segment by segment."""
    head = digest(writer.encode())
    for key in segments(store, writer)[writer].values():
        lines = []
        for line in store.get(key).decode().splitlines():
            body = json.loads(line)
            del body["h"]
            edit(body)
            body["prev"] = head
            head = digest(canonical(body))
            lines.append(json.dumps({**body, "h": head}, separators=(",", ":")))
        store.put(key, ("\n".join(lines) + "\n").encode())


def edit_all_facts(store, edit):
    for writer in segments(store):
        edit_facts(store, writer, edit)


def cut_segment(store, writer):
    store.delete(list(segments(store, writer)[writer].values())[-1])


def cut_line(store, writer):
    key = list(segments(store, writer)[writer].values())[-1]
    lines = store.get(key).splitlines(keepends=True)
    store.put(key, b"".join(lines[:-1])) if lines[1:] else store.delete(key)


def delete_writer(store, writer):
    for key in segments(store, writer)[writer].values():
        store.delete(key)


def add_writer(store, writer, *told):
    journal = Journal(store, writer, lambda: 1_000_050.0)
    for fact in told:
        journal.record(fact)
    journal.flush()


# ---- snapshots and records -----------------------------------------------------------------------
def refs(store):
    return sorted(
        Ref.parse(key.rpartition("/")[2].removesuffix(".json"))
        for key in store.list("snapshots/manifests/")
        if key.endswith(".json")
    )


def remake(store, edit):
    """Part lists and manifests made anew, oldest first, with their chain. `edit(list)`: another
    part list, or the same."""
    links = {}
    for ref in refs(store):
        world = Manifest.from_json(store.get(manifest_key(ref))).world
        lists = []
        for rank in range(world):
            one = edit(PartList.from_json(store.get(list_key(ref, rank))))
            if one.previous is not None:
                one = dataclasses.replace(one, previous=links.get(one.previous.ref, one.previous))
            lists.append(one)
            store.put(list_key(ref, rank), one.to_json().encode())
        manifest = Manifest.merge(lists)
        links[ref] = Link(ref, manifest.hash)
        store.put(manifest_key(ref), manifest.to_json().encode())


def drop(store, ref):
    store.delete(manifest_key(ref))
    for key in store.list(f"{PARTS}{ref.name}/"):
        store.delete(key)


def edit_records(store, edit):
    """`edit(record)`: another one. The chain is made anew, and all that names it."""
    body = json.loads(store.get("run.json"))
    head, names = rec.genesis(body), {}
    for key in store.list(rec.SAMPLES):
        made = []
        for one in rec.decode(store.get(key), key):
            made.append(edit(one).chained(head))
            head = made[-1].h
        store.delete(key)
        store.put(rec.key(made), rec.encode(made))
        names[key] = {"key": rec.key(made), "head": head}, made[-1].loss

    def renamed(one):
        if not one.data.get("samples"):
            return one
        name, loss = names[one.data["samples"]["key"]]
        more = {"loss": loss} if "loss" in one.data else {}
        samples = {**one.data["samples"], **name}
        return dataclasses.replace(one, data={**one.data, **more, "samples": samples})

    remake(store, renamed)


def other_weights(store, told):
    """Other bytes in the newest snapshot. `told`: in the facts as well."""
    newest, sums = refs(store)[-1], []

    def forged(one):
        if one.ref != newest:
            return one
        parts = []
        for part in one.parts:
            data = bytes(b ^ 1 for b in store.get(part.key))
            store.put(part.key, data)
            size = part.chunk_nbytes
            hashes = tuple(chunk_hash(data[i : i + size]) for i in range(0, len(data), size))
            parts.append(dataclasses.replace(part, hashes=hashes))
            sums.append(weights_sum(one.tensors, {part.key: memoryview(data)}, "model/"))
        data = {**one.data, "weights": combined([f"{sums[-1]:x}"])}
        return dataclasses.replace(one, parts=tuple(parts), data=data)

    remake(store, forged)

    def tell(body):
        if body["fact"] == "SnapshotCommitted" and body["step"] == newest.step:
            body["weights"] = combined([f"{one:x}" for one in sums])

    if told:
        edit_all_facts(store, tell)


def said_weights(store):
    newest = refs(store)[-1]

    def forged(one):
        wrong = {**one.data, "weights": "0" * 16}
        return dataclasses.replace(one, data=wrong) if one.ref == newest else one

    remake(store, forged)


def edit_epoch(store, number, **changes):
    body = json.loads(store.get(epoch_key(number)))
    del body["h"]
    body |= changes
    store.put(epoch_key(number), json.dumps({**body, "h": digest(canonical(body))}).encode())


# ---- the table -----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Tampering:
    """`alone`: it is found without a key. `seen`: only by who remembers an earlier head."""

    name: str
    do: Callable
    alone: bool = False
    seen: bool = False


TABLE: list[Tampering] = []


def tampering(name, **more):
    def add(do):
        TABLE.append(Tampering(name, do, **more))
        return do

    return add


@tampering("the bucket as it was two epochs ago", seen=True)
def _(store, old):
    restored(store, old)


@tampering("the newest snapshots deleted, all else left", alone=True)
def _(store, old):
    for ref in refs(store)[-2:]:
        drop(store, ref)


@tampering("snapshots, records and epochs as they were two epochs ago, facts cut to fit")
def _(store, old):
    """By an outsider who remembers what was there."""
    kept = {key for key in store.list("") if key.startswith("heads/")}
    for key in store.list(""):
        if key not in old.list("") and key not in kept:
            store.delete(key)
    for key in old.list(""):
        if key not in kept:
            store.put(key, old.get(key))


@tampering(".doomed on the newest", alone=True)
def _(store, old):
    store.put(manifest_key(refs(store)[-1]).removesuffix(".json") + ".doomed", b"{}")


@tampering("quarantine on the newest", alone=True)
def _(store, old):
    ref = refs(store)[-1]
    mark = canonical({"ref": ref.name, "why": "hash differs"})
    store.put(f"snapshots/quarantine/{ref.name}.json", mark)


@tampering("the last segment of an uploader's facts cut off")
def _(store, old):
    cut_segment(store, "uploader-m0001-aa")


@tampering("the last line of the controller's facts cut off")
def _(store, old):
    cut_line(store, "controller-000001")


@tampering("the last records cut off, with their snapshot and what was told of it", alone=True)
def _(store, old):
    ref = refs(store)[-1]
    key = Manifest.from_json(store.get(manifest_key(ref))).data["samples"]["key"]
    drop(store, ref)
    store.delete(key)
    cut_segment(store, "uploader-m0001-aa")


@tampering("an agent's facts deleted")
def _(store, old):
    delete_writer(store, "agent-e2")


@tampering("the controller's facts deleted", alone=True)
def _(store, old):
    delete_writer(store, "controller-000001")


@tampering("losses made anew in records and manifests", alone=True)
def _(store, old):
    edit_records(store, lambda one: dataclasses.replace(one, loss=one.loss / 2))


@tampering("losses made anew everywhere")
def _(store, old):
    edit_records(store, lambda one: dataclasses.replace(one, loss=one.loss / 2))

    def halve(body):
        if body["fact"] == "StepDone":
            body["loss"] /= 2

    edit_all_facts(store, halve)


@tampering("prices and bills made anew")
def _(store, old):
    def halve(body):
        if body["fact"] == "AttemptIntended":
            body["offer"]["usd_per_h"] /= 2
        elif body["fact"] == "AttemptEnded":
            body["usd"] /= 2
        elif body["fact"] == "PricesSeen":
            body["usd_per_h"] = {name: usd / 2 for name, usd in body["usd_per_h"].items()}

    edit_all_facts(store, halve)


@tampering("a wrong hash of the newest weights", alone=True)
def _(store, old):
    said_weights(store)


@tampering("other weights, hashes made anew", alone=True)
def _(store, old):
    other_weights(store, told=False)


@tampering("other weights, hashes made anew, also in the facts")
def _(store, old):
    other_weights(store, told=True)


@tampering("a manifest of an older epoch with its own step and another step's head", alone=True)
def _(store, old):
    first, ref = refs(store)[0], Ref(epoch=1, step=6)
    one = PartList.from_json(store.get(list_key(first, 0)))
    world = one.world
    for rank in range(world):
        one = PartList.from_json(store.get(list_key(first, rank)))
        data = dict(one.data)
        if rank == 0:
            data["samples"] = {**data["samples"], "last": ref.step}
        keys = {p.key: p.key.replace(first.name, ref.name) for p in one.parts}
        for key, new in keys.items():
            store.put(new, store.get(key))
        tensors = json.loads(json.dumps(one.tensors))
        for entry in tensors.values():
            for chunk in entry["chunks"]:
                chunk["part"] = keys[chunk["part"]]
        parts = tuple(dataclasses.replace(p, key=keys[p.key]) for p in one.parts)
        made = dataclasses.replace(one, ref=ref, parts=parts, tensors=tensors, data=data)
        store.put(list_key(ref, rank), made.to_json().encode())
    lists = [PartList.from_json(store.get(list_key(ref, rank))) for rank in range(world)]
    store.put(manifest_key(ref), Manifest.merge(lists).to_json().encode())


@tampering("an epoch's speeds and address changed")
def _(store, old):
    edit_epoch(store, 2, speeds=[0.5], addr="10.6.6.6")


# ---- more than the audit's 18 --------------------------------------------------------------------
EIGHTEEN = 18


@tampering("a bill of a controller that never was")
def _(store, old):
    t = 1_000_000.0
    more = asdict(dataclasses.replace(OFFER, usd_per_h=9.0))
    ended = facts.AttemptEnded(2, "finished", t, t, t + 3600, 0, "exited", 3600.0, 9.0, 20)
    add_writer(store, "controller-00000f", facts.AttemptIntended(2, more), ended)


@tampering("samples of another seed, with all that follows from it", alone=True)
def _(store, old):
    body = json.loads(store.get("run.json"))
    store.put("run.json", canonical({**body, "seed": body["seed"] + 1}))
    edit_records(store, lambda one: one)


@tampering("the run's identity says more than it did, with all that follows from it")
def _(store, old):
    body = json.loads(store.get("run.json"))
    store.put("run.json", canonical({**body, "model": "another"}))
    edit_records(store, lambda one: one)


def archived(store):
    """All facts in the archive."""
    Compactor(store, fewest=1).compact(all_of_them=True)
    return store


__all__ = ["EIGHTEEN", "TABLE", "Tampering", "TellingRun", "archived", "copied", "small_run"]
