"""Writes a small true run, the way the seats do it: for tests of audit, compare and trackers."""

import dataclasses
import itertools
import json
import random
from dataclasses import asdict

from harness.bucket.journal import Journal
from harness.bucket.layout import Epoch, epoch_key, phase_key
from harness.core import batch, facts, step_records
from harness.core.world import Offer
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.tensor_hash import combined, weights_sum
from storage.stores.folder_store import MemoryStore

IDENTITY = {
    "version": 1,
    "seed": 7,
    "samples": 50,
    "global_batch": 8,
    "micro_batch": 2,
    "shuffle": True,
    "data": "d",
    "model": "m",
    "reduce": "fast",
}
ELEMENTS = 100  # of the only tensor
OFFER = Offer(1.5, "local/a", accelerator="cpu", on_demand_usd_per_h=3.0)


class TrueRun:
    """Writes what a real run writes: facts, epochs, records, parts, manifests. Every `train` is
    one epoch."""

    def __init__(self, store=None, identity=IDENTITY, begin=True, loss=None, weights=True, salt=""):
        self.store = MemoryStore("memory://bucket/true-run", {}) if store is None else store
        self.identity, self.loss = dict(identity), loss or (lambda step: 2.0 / (step + 1))
        self.weights, self.salt = weights, salt
        self.head, self.step, self.epoch, self.t = step_records.genesis(self.identity), 0, 0, 1_000_000.0
        self.named, self.parent, self.sessions = None, None, itertools.count()
        self.phase, self.begins = 1, 0
        self.snapshots = Snapshots(self.store, chunk_nbytes=64)
        self.controller = Journal(self.store, "controller-000001", lambda: self.t)
        if begin:
            self.store.create("run.json", canonical(self.identity))
            self.controller.record(facts.LeaseTaken(1, "me"))
            self.controller.record(facts.AttemptIntended(1, asdict(OFFER)))
            self.controller.record(facts.AttemptUp(1, self.t + 5))
            self.controller.flush()

    @property
    def batching(self):
        i = self.identity
        return batch.Batching(
            i["samples"] or batch.MAX_SAMPLES,
            i["global_batch"],
            i["micro_batch"],
            i["seed"],
            i["shuffle"],
        )

    def next_phase(self, **identity):
        """Train something else from now on."""
        self.phase, self.begins = self.phase + 1, self.step
        self.identity |= identity | {"phase": self.phase, "begins": self.begins}
        self.store.create(phase_key(self.phase), canonical(self.identity))
        return self

    def record(self, step, world, **changes):
        b, place = self.batching, step - self.begins
        total = 0
        for micro in range(b.micro_batches):
            total += batch.digest(
                batch.sample_hash(batch.positions(b, place, micro), batch.indices(b, place, micro))
            )
        shares = batch.plan(b.micro_batches, world).shares
        made = step_records.StepRecord(
            step,
            self.epoch,
            world,
            shares,
            b.global_batch,
            f"{total % 2**64:016x}",
            float(b.global_batch),
            self.loss(step),
            0.1,
            self.t + 1,
            1.0,
            {"grad_norm": 1.0 / step},
            phase=self.phase,
            identity=step_records.genesis(self.identity)[:16] if self.phase > 1 else "",
        )
        return dataclasses.replace(made, **changes)

    def begin_epoch(self, world):
        self.epoch += 1
        self.t += 10
        epoch = asdict(
            Epoch(self.epoch, ("m0001-aa",), (world,), (1.0,), "127.0.0.1", 1234, "start")
        )
        epoch["h"] = digest(canonical(json.loads(json.dumps(epoch))))
        self.store.create(epoch_key(self.epoch), json.dumps(epoch).encode())
        agent = Journal(self.store, f"agent-e{self.epoch}", lambda: self.t)
        agent.record(facts.EpochStarted(self.epoch, ("m0001-aa",), world, "start"))
        agent.flush()

    def train(self, to, world=2, every=5, final=False, new_epoch=True, **changes):
        if new_epoch:
            self.begin_epoch(world)
        worker = Journal(
            self.store, f"worker-e{self.epoch:06d}-{next(self.sessions)}", lambda: self.t
        )
        worker.record(
            facts.SessionStarted(
                self.epoch, world, self.step, 0, 0, 8, 2, (2, 2), "fast", "ddp", "cpu", 0.1
            )
        )
        unsaved = []
        while self.step < to:
            self.step += 1
            r = self.record(self.step, world, **changes).chained(self.head)
            self.head = r.h
            self.t += 1
            unsaved.append(r)
            worker.record(facts.StepDone(r.step, r.epoch, r.loss, self.t - 1, 1.0, 8, 0))
            if self.step % every == 0 or self.step == to:
                self.snapshot(unsaved, world, final and self.step == to)
                worker.flush()
                unsaved = []
        return self

    def snapshot(self, unsaved, world, final=False):
        ref = Ref(epoch=self.epoch, step=self.step)
        if unsaved:
            key = step_records.key(unsaved)
            self.store.create(key, step_records.encode(unsaved))
            self.named = {
                "key": key,
                "head": unsaved[-1].h,
                "first": unsaved[0].step,
                "last": unsaved[-1].step,
            }
        whole = random.Random(f"{self.step}{self.salt}").randbytes(4 * ELEMENTS)
        for rank in range(world):
            first, end = (ELEMENTS * r // world for r in (rank, rank + 1))
            content = whole[4 * first : 4 * end]  # the same weights in any world
            chunk = {"offsets": [first], "sizes": [end - first], "part": "w"}
            chunk |= {"start": 0, "end": len(content)}
            tensors = {"model/w": {"shape": [ELEMENTS], "dtype": "float32", "chunks": [chunk]}}
            data = (
                {
                    "final": final,
                    "parent": self.parent.name if self.parent else "",
                    "samples": self.named,
                    **({"phase": self.phase} if self.phase > 1 else {}),
                }
                if rank == 0
                else {}
            )
            if self.weights:
                data["weights"] = combined(
                    [f"{weights_sum(tensors, {'w': memoryview(content)}, 'model/'):x}"]
                )
            self.snapshots.write(
                ref, rank, world, {"w": content}, tensors, data, f"t{self.epoch}-{rank}"
            )
        assert self.snapshots.commit(ref, world) is not None
        self.parent = ref

    def rewind(self, ref):
        """Go on from an older snapshot, as a new epoch would."""
        manifest = self.snapshots.load(ref)
        self.step, self.parent, self.named = ref.step, ref, manifest.data["samples"]
        self.head = self.named["head"] if self.named else step_records.genesis(self.identity)
        return self

    def end(self, outcome="done", **changes):
        up, gone = 1_000_005.0, self.t + 0.7
        ended = facts.AttemptEnded(
            1,
            "finished",
            up - 5,
            up,
            gone,
            0,
            "exited",
            gone - up,
            (gone - up) / 3600 * OFFER.usd_per_h,
            self.step,
        )
        self.t += 1
        self.controller.record(dataclasses.replace(ended, **changes))
        self.controller.record(facts.RunEnded(outcome, "", self.step))
        self.controller.flush()
        return self
