"""The whole way, for real: `harness launch --cloud sky` on the lab's two clouds, with everything
that can happen to a run.

    python tests/slurm/scenario.py DIR [--short]     (DIR: of a lab that is up, see lab.py; or `make lab`)

Two members train on the cheaper cloud. One gets a notice (its machine has the metadata service of
AWS) and leaves; another takes its place. One is powered off without a word, and there is no more
capacity: the run goes on with fewer. The last one is taken too, and the run moves to the dearer
cloud. The controller is killed, and another one adopts the nodes; SkyPilot's API server is
restarted under it. Capacity returns, and the run moves back, because that pays. Then it is stopped,
and resumed for its last steps. `harness prove verify` must hold, nothing may be left, and the bill must
agree with SkyPilot's. Another run has a budget that ends in its middle: it is kept, by both bills.
The two fine-tuning tasks are run at toy size, each with a power cut, and their weights exported.
At last a run's controller, SkyPilot's server and its bucket vanish: its node ends by itself.

What is waited for are facts; how long it takes depends on the computer: 10 minutes on an idle one
with 2 cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parent.parent.parent),
]

from task import in_lab  # noqa: E402

from harness.bucket.journal import Follower  # noqa: E402
from harness.core.facts import (  # noqa: E402
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    Decided,
    EpochStarted,
    LeaseTaken,
    NoticeSeen,
    RunEnded,
    SnapshotCommitted,
    Stamped,
)
from harness.local.metadata_server import MetadataServer, environment_of, metadata_service  # noqa: E402
from lab import CLUSTERS, PYTHON, Lab  # noqa: E402
from storage.snapshots.snapshots import Snapshots  # noqa: E402
from storage.stores.store_urls import open_store  # noqa: E402

WITHIN_S = 900.0  # of a computer that others use too
MANY, FEW = 100_000, 12  # steps: more than the story needs, and those after it
GRACE_S = 120.0  # of AWS
# two members cost 3 USD an hour: some minutes of them; drains and ends are held back
BUDGET_USD = 0.45
OVER_SHARE, OVER_NODE_S = 0.02, 60.0  # of it, or of each node: what may be spent beyond it
LEASE_S = 90.0  # of a node that nobody leads; it looks four times in it
ENDED_WITHIN_S = LEASE_S + 120.0  # of its last look at its bucket: the looks, a grace, Slurm's own
DECIDED_WITHIN_S = 5.0  # of the fact that a node is gone, while the controller is there


SHORT = ("begin", "losses", "stop", "check")
LONG = ("begin", "notice", "losses", "seats", "back", "stop", "resume", "check")
WHOLE = (*LONG, "budget", "finetunes", "vanish")  # the last three are runs of their own

# other people's trainers, as `make adapters` installs them
TRAINERS = Path(__file__).resolve().parent.parent.parent / ".venv-adapters"
TOY = r"""
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

into = Path(sys.argv[1])
words = {w: n for n, w in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(into)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads)).save_pretrained(into)
rows = [" ".join(f"w{(i * i + j * 7) % 60}" for j in range(24)) for i in range(400)]
(into / "data.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
for file in into.iterdir():
    file.chmod(0o644)  # safetensors makes its own for nobody else
"""


class Scene:
    def __init__(self, lab: Lab):
        self.lab, self.url = lab, str(lab.bucket / f"run-{int(time.time())}")
        self.task = in_lab("train.yaml", lab.venv, lab.root / "train.yaml", lab.code)
        self.controller: subprocess.Popen[bytes] | None = None
        self.store = open_store(self.url)
        self.machines = self.metadata()
        self.follower, self.known = Follower(self.store), list[Stamped]()
        self.done: list[tuple[float, str]] = []  # when what was done to the run

    def metadata(self) -> dict[str, MetadataServer]:
        """Every node gets a metadata service; where it is stands on its local disk."""
        found = {}
        for cluster in CLUSTERS:
            for node in cluster.nodes:
                found[node] = MetadataServer(metadata_service("aws", node))
                says = environment_of("aws", found[node].endpoint)
                where = self.lab.root / "clusters" / cluster.name / "nodes" / node / "metadata"
                where.write_text(
                    "".join(f"export {name}={value}\n" for name, value in says.items())
                )
                where.chmod(0o644)
        return found

    # -- what a person does --
    def harness(self, *words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        command = [str(self.lab.venv / "bin/harness"), *words]
        return subprocess.run(
            command,
            env=self.lab.env(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.lab.code,
        )

    def launch(self, steps: int, budget_usd: float = 20.0, **envs: str) -> None:
        command = [
            str(self.lab.venv / "bin/harness"),
            "launch",
            str(self.task),
            "--cloud",
            "sky",
            "--run",
            self.url,
            "--nodes",
            "1:2",
        ]
        for name, value in (envs or {"STEPS": str(steps)}).items():
            command += ["--env", f"{name}={value}"]
        command += [
            "--budget-usd",
            str(budget_usd),
            "--move-stay-s",
            "120",
            "--on-interrupt",
            "drain",
        ]
        with open(self.lab.root / "log" / "scenario.log", "ab") as log:
            self.controller = subprocess.Popen(
                ["sh", "-c", 'umask 0; exec "$@"', "sh", *command],
                env=self.lab.env(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.lab.code,
            )

    # -- what the bucket says --
    def stamped(self) -> list[Stamped]:
        self.known += self.follower.poll()
        return self.known

    def facts(self, kind: type) -> list[Any]:
        return [s.fact for s in self.stamped() if isinstance(s.fact, kind)]

    def step(self) -> int:
        newest = Snapshots(self.store).latest()
        return newest.step if newest else 0

    def worlds(self) -> list[int]:
        """The size of every epoch, in order."""
        return [
            e.world
            for e in sorted(
                {e.epoch: e for e in self.facts(EpochStarted)}.values(), key=lambda e: e.epoch
            )
        ]

    def places(self) -> list[str]:
        """Of the attempts that are up."""
        offers = {f.attempt: f.offer["place"] for f in self.facts(AttemptIntended)}
        ended = {f.attempt for f in self.facts(AttemptEnded)}
        return sorted(offers[n] for n in {f.attempt for f in self.facts(AttemptUp)} - ended)

    def ends(self) -> list[str]:
        return [f.end for f in self.facts(AttemptEnded)]

    def until(self, what: str, true: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > within_s:
                raise SystemExit(
                    f"not within {within_s:g} s: {what}; look at {self.lab.root}/log/scenario.log "
                    f"and {self.url}"
                )
            if self.controller and self.controller.poll() is not None:
                raise SystemExit(
                    f"the controller ended ({self.controller.returncode}) before: {what}"
                )
            time.sleep(0.5)
        print(f"{time.strftime('%T')}  {what}  ({time.monotonic() - began_s:.1f} s)", flush=True)

    def did(self, what: str) -> None:
        self.done.append((time.time(), what))
        print(f"{time.strftime('%T')}  -- {what}", flush=True)

    def goes_on(self, what: str) -> None:
        at = self.step()
        self.until(what, lambda: self.step() > at)

    # -- the story --
    def begin(self) -> None:
        self.did("harness launch, 1 to 2 nodes")
        self.launch(MANY)
        self.until(
            "two members train in the cheaper cloud",
            lambda: 2 in self.worlds() and set(self.places()) == {"slurm/east"},
        )
        self.until("a snapshot is committed", lambda: self.step() > 0)

    def dear(self) -> None:
        """To begin where it is dearer, for lack of capacity (instead of `begin`; `back` can
        follow)."""
        self.lab.drain("east")
        self.launch(MANY)
        self.until(
            "two members train in the dearer cloud",
            lambda: self.worlds()[-1:] == [2] and set(self.places()) == {"slurm/west"},
        )
        self.until("a snapshot is committed", lambda: self.step() > 0)

    def notice(self) -> None:
        """A machine is told that it will be taken, and is."""
        node = self.lab.busy("east")[0]
        epochs = len(self.worlds())
        self.machines[node].protocol.notice("kill", time.time() + GRACE_S)
        self.did(f"{node} is told that it will be taken")
        self.until(
            "the notice is seen", lambda: any(f.notice == "kill" for f in self.facts(NoticeSeen))
        )
        self.until("it leaves with its state committed", lambda: "drained" in self.ends())
        self.lab.take(node)
        self.did(f"{node} is taken")
        self.until("another takes its place", lambda: self.worlds()[epochs:][-1:] == [2])
        if 1 not in self.worlds()[epochs:]:
            print("          (before the world had become smaller)")

    def losses(self) -> None:
        """Power cuts, and no more capacity."""
        victim, other = self.lab.busy("east")
        self.lab.drain("east")
        self.lab.power_off(victim)
        self.did(f"no capacity in east; {victim} is powered off")
        epochs = len(self.worlds())
        self.until("the other goes on alone", lambda: 1 in self.worlds()[epochs:])
        self.until("the loss is known", lambda: "preempted" in self.ends())
        self.goes_on("steps are made alone")
        self.lab.take(other)
        self.did(f"{other} is taken")
        self.until(
            "the run has moved to the dearer cloud", lambda: set(self.places()) == {"slurm/west"}
        )
        self.until("two train there", lambda: self.worlds()[-1] == 2 and len(self.places()) == 2)

    def seats(self) -> None:
        """The controller dies, the API server is restarted: the training goes on, and no node
        is launched twice."""
        assert self.controller
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()
        self.did("the controller is killed")
        self.controller, before = None, len(self.facts(AttemptIntended))
        self.goes_on("training goes on without a controller")
        terms = len(self.facts(LeaseTaken))
        self.launch(MANY)
        self.did("another controller is launched")
        self.until("it leads the run", lambda: len(self.facts(LeaseTaken)) > terms)
        self.goes_on("... and training goes on with it")
        self.stop_server()
        self.goes_on("... and while the API server is restarted")
        # to make a move ready is no doubling
        new = [f for f in self.facts(AttemptIntended)[before:] if "cheaper there" not in f.reason]
        if new:
            raise SystemExit(f"the new controller launched nodes though all were there: {new}")

    def stop_server(self) -> None:
        subprocess.run(
            [self.lab.venv / "bin/sky", "api", "stop"],
            env=self.lab.env(),
            timeout=120,
            check=True,
            capture_output=True,
        )
        self.did("the API server was stopped; whoever needs it starts it")

    def back(self) -> None:
        """Machines come back, and there is capacity again where it is cheaper."""
        for node in CLUSTERS[0].nodes:
            self.machines[node].protocol.cancel()
            self.lab.power_off(node)
            self.lab.node_up(node)
        self.lab.resume("east")
        self.did("there is capacity in east again")
        self.until(
            "the run has moved back to the cheaper cloud",
            lambda: self.places() == ["slurm/east"] * 2,
        )
        self.until("two train there", lambda: self.worlds()[-1] == 2)
        self.goes_on("... and make progress")

    def stop(self) -> None:
        """Stopped by a person."""
        assert self.controller
        told = self.harness("stop", self.url, "--wait-s", "0")
        if told.returncode:
            raise SystemExit(f"harness stop failed: {told.stderr}")
        controller, self.controller = self.controller, None
        self.did("a person asks it to stop")
        self.until("the run has stopped, its nodes are gone", lambda: controller.poll() is not None)

    def resume(self) -> None:
        """And resumed for its last steps."""
        at = self.step()
        self.launch(at + FEW)
        self.did(f"launched again, for {FEW} more steps than the {at} that it has")
        controller, self.controller = self.controller, None
        self.until(
            "it is resumed and ends",
            lambda: controller is not None and controller.poll() is not None,
        )
        last = self.facts(RunEnded)[-1]
        if (last.outcome, last.committed_step) != ("done", at + FEW):
            raise SystemExit(f"wanted it to be done at step {at + FEW}, found {last}")

    def budget(self) -> None:
        """Another run, whose budget ends in its middle."""
        self.another("budget")
        self.did(f"harness launch, 1 to 2 nodes, for {BUDGET_USD:g} USD")
        self.launch(MANY, BUDGET_USD)
        self.until("two members train", lambda: 2 in self.worlds())
        self.until("a snapshot is committed", lambda: self.step() > 0)
        controller, self.controller = self.controller, None
        self.until(
            "the budget ends the run",
            lambda: controller is not None and controller.poll() is not None,
        )
        self.table()
        ended, held = self.facts(RunEnded)[-1], [n for c in CLUSTERS for n in self.lab.busy(c.name)]
        left, bill = self.clusters(), self.bill()
        print(json.dumps(bill), flush=True)
        if ended.outcome != "stopped" or "budget" not in ended.reason or not ended.committed_step:
            raise SystemExit(f"wanted it stopped by its budget, with a snapshot; found {ended}")
        if "No existing clusters" not in left or held:
            raise SystemExit(f"nothing may be left; held {held}, sky status:\n{left}")
        node_usd = sum(c.usd_per_gpu_h for c in CLUSTERS[:1]) * OVER_NODE_S / 3600
        most_usd = BUDGET_USD + max(OVER_SHARE * BUDGET_USD, bill["attempts"] * node_usd)
        if not 0 < max(bill["ours_usd"], bill["skypilot_usd"]) <= most_usd:
            raise SystemExit(f"wanted no more than {most_usd:.4f} USD spent, found {bill}")
        print("The budget was kept.")

    def finetunes(self) -> None:
        """The tasks of unchanged TRL scripts, all weights and LoRA, with two ranks to each copy of a
        toy model: a node loses its power, and the other one ends the run."""
        if not (TRAINERS / "bin/harness").exists():
            print("no fine-tuning: the trainers are not installed (make adapters)")
            return
        toy, venv = self.lab.root / "toy", self.lab.root / "trainers"
        if not venv.exists():  # of Debian's Python, which the nodes' user may run
            subprocess.run([PYTHON, "-m", "venv", "--without-pip", venv], check=True)
        [theirs], [ours] = (list(v.glob("lib/*/site-packages")) for v in (TRAINERS, venv))
        (ours / "trainers.pth").write_text(f"{theirs}\n")
        command = (TRAINERS / "bin/harness").read_text().partition("\n")[2]
        (venv / "bin/harness").write_text(f"#!{venv}/bin/python\n{command}")
        (venv / "bin/harness").chmod(0o755)
        toy.mkdir(exist_ok=True)
        subprocess.run([venv / "bin/python", "-c", TOY, str(toy)], check=True)
        self.finetune("finetune_8b", venv, toy, "--rank 0")
        self.finetune("finetune_70b", venv, toy, "--rank 4")

    def finetune(self, name: str, venv: Path, toy: Path, words: str) -> None:
        for cluster in CLUSTERS:  # as it was, whatever happened before
            for node in cluster.nodes:
                if not (self.lab.root / "pids" / f"slurmd-{node}").exists():
                    self.lab.node_up(node)
            self.lab.resume(cluster.name)
        often = "--nproc 2 --attach snapshot_every_steps=4"
        self.another(name, often, task=f"{name}.yaml", venv=venv)
        self.did(f"harness launch sky_tasks/{name}.yaml, 1 to 2 nodes")
        args = f"--fsdp {words} --batch 2 --accumulation 4 --steps 60 --eval-every 20"
        files = f"--model {toy} --data {toy}/data.jsonl --output-dir /tmp/{name}"
        self.launch(0, MESH="dp_shard=2", SCRIPT_WORLD="2", ARGS=f"{args} {files}")
        self.until("two copies of the model train", lambda: 4 in self.worlds())
        self.goes_on("they commit a snapshot")
        victim = self.lab.busy("east")[0]
        self.lab.drain("east")
        self.lab.power_off(victim)
        self.did(f"no capacity in east; {victim} is powered off")
        controller, self.controller = self.controller, None
        self.until(
            "one copy, or another two, end the run",
            lambda: controller is not None and controller.poll() is not None,
        )
        self.check()
        ended, into = self.facts(RunEnded)[-1], self.lab.root / f"{name}-weights"
        if (ended.outcome, ended.committed_step) != ("done", 60) or "preempted" not in self.ends():
            raise SystemExit(f"wanted it done at step 60 after a loss, found {ended}, {self.ends()}")
        told = self.harness("snapshots", "export", self.url, str(into))
        files_there = [p.name for p in into.rglob("*.safetensors")]
        if told.returncode or not files_there:
            raise SystemExit(f"wanted its weights as safetensors, found {files_there}: {told.stderr}")
        print(f"{name}: done after a power cut; exported {', '.join(files_there)}", flush=True)

    def vanish(self) -> None:
        """A node whose controller, bucket and laptop are gone, each for good."""
        lease = f"--set leaderless_hours={LEASE_S / 3600:.4f}"
        self.another("vanish", lease)
        self.did("harness launch, 1 to 2 nodes")
        self.launch(MANY)
        self.until("two members train", lambda: 2 in self.worlds())
        self.until("a snapshot is committed", lambda: self.step() > 0)
        assert self.controller
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()
        self.controller = None
        self.stop_server()
        Path(self.url).chmod(0)  # every request is refused, as of a bucket of a closed account
        self.did("controller, SkyPilot's server and bucket are gone")
        self.until(
            "the nodes have ended by themselves",
            lambda: not any(self.lab.busy(c.name) for c in CLUSTERS),
            ENDED_WITHIN_S,
        )
        Path(self.url).chmod(0o777)
        if "No existing clusters" not in (left := self.clusters()):
            raise SystemExit(f"SkyPilot still has clusters, though their nodes have ended:\n{left}")

    def another(
        self, name: str, flags: str = "", task: str = "train.yaml", venv: Path | None = None
    ) -> None:
        """Turn to another run. `flags`: of its `harness run`, as its task writes them; `venv`: of
        its nodes, the lab's own if None."""
        self.url = str(self.lab.bucket / f"{name}-{int(time.time())}")
        self.store = open_store(self.url)
        self.follower, self.known, self.done = Follower(self.store), [], []
        into = self.lab.root / f"{name}.yaml"
        self.task = in_lab(task, venv or self.lab.venv, into, self.lab.code, flags=flags)

    def clusters(self) -> str:
        """Those that SkyPilot has, in its words."""
        command = [self.lab.venv / "bin/sky", "status", "-r"]
        return subprocess.run(
            command, env=self.lab.env(), capture_output=True, text=True, timeout=300
        ).stdout

    def check(self) -> None:
        """What must be true when it is over."""
        self.table()
        late = [f"attempt {n}: {s:.1f} s" for n, s in self.decisions() if s > DECIDED_WITHIN_S]
        verified = self.harness("prove", "verify", self.url)
        print(f"harness prove verify: {verified.stdout.splitlines()[-1]}", flush=True)
        left = self.clusters()
        held = [n for c in CLUSTERS for n in self.lab.busy(c.name)]
        bill = self.bill()
        print(json.dumps(bill), flush=True)
        if verified.returncode or "No existing clusters" not in left or held:
            raise SystemExit(
                f"verify {verified.returncode}, held {held}, sky status:\n{left}\n{verified.stdout}"
            )
        if abs(bill["ours_usd"] - bill["skypilot_usd"]) > 0.25 * bill["skypilot_usd"]:
            raise SystemExit("the two bills differ by more than a quarter")
        if late:
            raise SystemExit(
                f"decided later than {DECIDED_WITHIN_S:g} s after a loss: {', '.join(late)}"
            )
        print("Everything holds.")

    def decisions(self) -> list[tuple[int, float]]:
        """(attempt that was lost, seconds from the fact that it is gone to the fact that
        another is launched), unless one was already."""
        intended = {
            s.fact.attempt: s for s in self.stamped() if isinstance(s.fact, AttemptIntended)
        }
        settled: dict[int, float] = {}  # when it was up, or gone without
        for s in self.stamped():
            if isinstance(s.fact, (AttemptUp, AttemptEnded)):
                settled.setdefault(s.fact.attempt, s.t)
        found = []
        for s in self.stamped():
            if not isinstance(s.fact, AttemptEnded) or s.fact.end != "preempted":
                continue
            pending = [n for n, i in intended.items() if i.t < s.t < settled.get(n, math.inf)]
            after = [i.t for i in intended.values() if i.t >= s.t and i.writer == s.writer]
            if after and not pending:
                found.append((s.fact.attempt, min(after) - s.t))
        return found

    def table(self) -> None:
        """What happened and when, from the facts, beside what was done to the run."""
        rows = [
            *((t, "", what) for t, what in self.done),
            *((s.t, s.fact.kind, said) for s in self.stamped() if (said := words(s))),
        ]
        began_s = min(t for t, _, _ in rows)
        print("\n      s  fact               what")
        for t, kind, what in sorted(rows):
            print(f"{t - began_s:7.1f}  {kind or '(done to it)':<17}  {what}")
        for attempt, seconds in self.decisions():
            print(f"decided {seconds:.2f} s after attempt {attempt} was known to be lost")
        print(f"{time.time() - began_s:.0f} s in all", flush=True)

    def bill(self) -> dict[str, Any]:
        """What we say that the run cost, and what SkyPilot says."""
        from harness.clouds.sky_broker import Broker
        from harness.clouds.sky_clusters import billed
        from storage.stores.store_urls import normalize

        broker = Broker(self.lab.env(), self.lab.root / "log" / "broker.log")
        theirs = billed(broker, normalize(self.url))
        broker.close()
        ended = {f.attempt: f for f in self.facts(AttemptEnded)}
        rows = {int(r["name"].rpartition("-")[2]): r["total_cost"] for r in theirs}
        billed = {n: f for n, f in ended.items() if f.end != "no-capacity"}
        return {
            "ours_usd": round(sum(f.usd for f in billed.values()), 4),
            "skypilot_usd": round(sum(rows.get(n, 0.0) for n in billed), 4),
            "attempts": len(ended),
            "ends": {end: self.ends().count(end) for end in sorted(set(self.ends()))},
        }


def words(s: Stamped) -> str:
    """One line of the table; empty for what happens all the time."""
    match s.fact:
        case LeaseTaken():
            return f"controller {s.fact.term}"
        case AttemptIntended():
            return f"attempt {s.fact.attempt} on {s.fact.offer['name']}: {s.fact.reason}"
        case AttemptUp():
            return f"attempt {s.fact.attempt}, {s.t - s.fact.up_s:.0f} s billed by now"
        case AttemptEnded():
            return (
                f"attempt {s.fact.attempt} {s.fact.end}, {s.fact.usd:.4f} USD, at step "
                f"{s.fact.committed_step} ({s.fact.reason[:60]})"
            )
        case NoticeSeen():
            return f"{s.fact.member}: {s.fact.notice} from {s.fact.source}"
        case EpochStarted():
            return f"epoch {s.fact.epoch}, world {s.fact.world}: {s.fact.reason}"
        case SnapshotCommitted() if s.fact.why != "interval":
            return f"step {s.fact.step}, for {s.fact.why}"
        case Decided() if s.fact.decision != "wait":
            return f"{s.fact.decision}: {s.fact.reason}"
        case RunEnded():
            return f"{s.fact.outcome} at step {s.fact.committed_step}: {s.fact.reason}"
        case _:
            return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", help="where the lab's state lies (python tests/slurm/lab.py up DIR)")
    parser.add_argument(
        "--only",
        default=",".join(WHOLE),
        help="these parts, in order; `dear` instead of `begin` is another one",
    )
    parser.add_argument(
        "--short",
        action="store_const",
        dest="only",
        const=",".join(SHORT),
        help=f"only {', '.join(SHORT)}",
    )
    flags = parser.parse_args()
    os.umask(0)
    lab = Lab(flags.dir)
    lab.refresh_code()
    scene = Scene(lab)
    for part in flags.only.split(","):
        getattr(scene, part)()


if __name__ == "__main__":
    main()
