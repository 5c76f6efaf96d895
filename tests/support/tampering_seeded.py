"""Tamperings made from a seed: a class of objects and an edit, with every hash made anew that an
outsider can make; or one object, deleted, cut, changed or exchanged as it is."""

import dataclasses
import json
import random
from dataclasses import asdict

from harness.bucket.archive import raw_key, segments
from harness.bucket.layout import epoch_key, segment_key
from harness.core import facts
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Manifest, PartList, Ref
from storage.snapshots.snapshot_keys import list_key, manifest_key
from support.tampering import (
    cut_line,
    cut_segment,
    edit_epoch,
    edit_facts,
    edit_records,
    refs,
    remake,
)


def _numbers(body, path=()):
    """Where numbers are in a body."""
    pairs = body.items() if isinstance(body, dict) else enumerate(body)
    for name, value in pairs:
        if isinstance(value, dict | list):
            yield from _numbers(value, (*path, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, name)


def _nudge(rng, body):
    places = list(_numbers(body))
    if not places:
        return
    *path, last = rng.choice(places)
    for name in path:
        body = body[name]
    body[last] += 1


def edit_fact(store, rng):
    """A number of a line of some writer, and its chain."""
    writer = rng.choice(sorted(segments(store)))
    lines = sum(len(store.get(k).splitlines()) for k in segments(store, writer)[writer].values())
    at, wanted = iter(range(lines)), rng.randrange(lines)
    edit_facts(store, writer, lambda body: _nudge(rng, body) if next(at) == wanted else None)


def drop_lines(store, rng):
    """The end of some writer's facts."""
    writer = rng.choice(sorted(segments(store)))
    for _ in range(rng.randint(1, 3)):
        if writer in segments(store):
            rng.choice((cut_line, cut_segment))(store, writer)


def drop_volume(store, rng):
    """The newest part of the archive, or else of somebody's facts."""
    volumes = store.list("archive/raw/")
    if not volumes:
        drop_lines(store, rng)
        return
    assert volumes[-1] == raw_key(len(volumes) - 1)
    store.delete(volumes[-1])
    for kind in ("brief", "steps"):
        store.delete(store.list(f"archive/{kind}/")[-1])


def append_fact(store, rng):
    """One more segment of some writer, as it would chain it."""
    writer = rng.choice(sorted(segments(store)))
    keys = segments(store, writer)[writer]
    last = json.loads(store.get(keys[max(keys)]).splitlines()[-1])
    told = facts.Warned(1, 1, "nothing of interest")
    body = {"fact": told.kind, "t": last["t"], **asdict(told), "prev": last["h"]}
    line = json.dumps({**body, "h": digest(canonical(body))}, separators=(",", ":"))
    store.put(segment_key(writer, max(keys) + 1), line.encode() + b"\n")


def edit_record(store, rng):
    """A number of a step record, and the chain after it."""
    total = max(ref.step for ref in refs(store))
    step, name = rng.randint(1, total), rng.choice(("lr", "t", "dt", "weight", "loss"))

    def change(one):
        return dataclasses.replace(one, **{name: getattr(one, name) + 1}) if step == one.step else one

    edit_records(store, change)


def edit_manifest(store, rng):
    """Something that a manifest says of a snapshot, and all manifests after it."""
    ref = rng.choice(refs(store))

    def change(one):
        if one.ref != ref or one.rank:
            return one
        return dataclasses.replace(one, data={**one.data, "note": rng.random()})

    remake(store, change)


def edit_any_epoch(store, rng):
    body = json.loads(store.get(epoch_key(rng.randint(1, 3))))
    del body["h"]
    number = body["epoch"]
    name, value = rng.choice((("port", 1), ("speeds", [9.0]), ("streak", 5), ("addr", "10.6.6.6")))
    edit_epoch(store, number, **{name: value})


def add_epoch(store, rng):
    body = json.loads(store.get(epoch_key(3)))
    store.put(epoch_key(4), json.dumps(body).encode())
    edit_epoch(store, 4, epoch=4)


def add_snapshot(store, rng):
    """The newest once more, as that of the next epoch."""
    newest = refs(store)[-1]
    ref = Ref(epoch=newest.epoch + 1, step=newest.step)
    add_epoch(store, rng)
    world, previous = Manifest.from_json(store.get(manifest_key(newest))).world, None
    lists = []
    for rank in range(world):
        one = PartList.from_json(store.get(list_key(newest, rank)))
        text = one.to_json().replace(f"/{newest.name}/", f"/{ref.name}/")
        body = json.loads(text)
        made = dataclasses.replace(
            one,
            ref=ref,
            parts=tuple(
                dataclasses.replace(p, key=p.key.replace(newest.name, ref.name)) for p in one.parts
            ),
            tensors=body["tensors"],
            data={**one.data, "parent": newest.name} if rank == 0 else one.data,
            previous=previous,
        )
        for p in one.parts:
            store.put(p.key.replace(newest.name, ref.name), store.get(p.key))
        store.put(list_key(ref, rank), made.to_json().encode())
        lists.append(made)
    store.put(manifest_key(ref), Manifest.merge(lists).to_json().encode())


def edit_head(store, rng):
    key = rng.choice(store.list("heads/"))
    body = json.loads(store.get(key))
    _nudge(rng, body)
    store.put(key, canonical(body))


def add_head(store, rng):
    """As the newest, one number on, with its signature."""
    key = store.list("heads/")[-1]
    body = json.loads(store.get(key))
    body |= {"number": body["number"] + 1, "prev": digest(store.get(key))}
    store.put(f"heads/{body['number']:08d}.json", canonical(body))


def edit_identity(store, rng):
    body = json.loads(store.get("run.json"))
    name = rng.choice(("data", "model", "reduce"))
    store.put("run.json", canonical({**body, name: "another"}))
    edit_records(store, lambda one: one)


def add_mark(store, rng):
    ref = rng.choice(refs(store))
    kind = rng.choice(("quarantine", "ended", "rewind"))
    if kind == "rewind":
        store.put("control/rewind-000009.json", canonical({"step": 0, "was": 20}))
    elif kind == "ended":
        store.put(f"snapshots/manifests/{ref.name}.ended", b"{}")
    else:
        store.put(f"snapshots/quarantine/{ref.name}.json", canonical({"ref": ref.name}))


def add_setup(store, rng):
    data = canonical({"version": 1, "argv": [str(rng.random())]})
    store.put(f"setup/session-{digest(data)}.json", data)


REMADE = (
    *(edit_fact, drop_lines, drop_volume, append_fact, edit_record),
    *(edit_manifest, edit_any_epoch, add_epoch),
    *(add_snapshot, edit_head, add_head, edit_identity, add_mark, add_setup),
)
# one object, as it is: deleted, cut, another's content, an older one's, or one byte of it
PLAIN = {
    "facts": "facts/",
    "records": "samples/",
    "manifests": "snapshots/manifests/",
    "part lists": "snapshots/parts/",
    "epochs": "rdzv/epochs/",
    "identity": "run.json",
    "heads": "heads/",
    "archive": "archive/",
}


def one_object(store, rng):
    name = rng.choice(sorted(name for name, where in PLAIN.items() if store.list(PLAIN[name])))
    keys = store.list(PLAIN[name])
    key = rng.choice(keys)
    data = store.get(key)
    at = rng.randrange(len(data))
    others = [other for other in keys if store.get(other) != data]
    # nobody needs a part list once its snapshot is committed, and whoever takes one loses nothing
    ways = ["cut", "byte", *(["swap", "older"] if others else []), "delete"]
    way = rng.choice(ways[:-1] if "/list-" in key else ways)
    if way == "delete":
        store.delete(key)
    elif way == "cut":
        store.put(key, data[:at])
    elif way == "byte":
        store.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    else:
        other = rng.choice(others)
        if way == "swap":
            store.put(key, store.get(other))
            store.put(other, data)
        else:
            store.put(key, store.get(other))
    return f"{way} {key}"


def seeded(store, seed):
    """One tampering: what was done, in words."""
    rng = random.Random(seed)
    do = rng.choice([*REMADE, *[one_object] * 5])
    return f"seed {seed}: {do.__name__} {do(store, rng) or ''}"


