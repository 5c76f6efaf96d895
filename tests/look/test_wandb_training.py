"""A real training that loses nodes, workers and publishers, told to W&B on loopback by a key alone:
`make wandb`, some minutes."""

import contextlib
import os
import random

import psutil
import pytest

from harness.core.facts import EpochStarted
from harness.look.trackers.publisher import sync
from harness.look.trackers.tracker_stream import every_row, newest_header
from harness.look.trackers.wandb_api import Account
from storage.stores.store_urls import open_store
from support.campaign import Campaign
from support.wandb_server import WandbServer
from support.wandb_sides import ledger_of, lines, states_of
from support.worlds import TRAINER, history

pytestmark = pytest.mark.skipif(not os.environ.get("HARNESS_HEAVY"), reason="make wandb")
pytest.importorskip("wandb", minversion="0.31")
TASK = """\
name: told
workdir: {workdir}
resources: {{use_spot: true, accelerators: L4:1, job_recovery: {{recover_on_exit_codes: [33]}}}}
envs: {{RUN: null, FLAGS: "", WANDB_BASE_URL: "{url}", WANDB_ERROR_REPORTING: "false"}}
secrets: {{WANDB_API_KEY: null}}
run: |
  exec harness run --run "$RUN" --set measure_s=2 -- {trainer} $FLAGS
"""


def publishers(campaign):
    found = []
    for p in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = p.cmdline()
            if "harness.look.trackers.trackers" in words and any(str(campaign.run) in w for w in words):
                found.append(p)
    return found


def kill_a_publisher(campaign):
    campaign.until(lambda: publishers(campaign))
    for process in publishers(campaign)[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Told:
    """The run as W&B has it, as a store that `ledger_of` reads."""

    def __init__(self, url):
        self.store = open_store(url)


@pytest.mark.timeout(900)
def test_a_training_that_goes_through_much(tmp_path, monkeypatch):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    rng = random.Random(14)
    with WandbServer() as server, states_of(server) as states:
        c = Campaign(
            tmp_path,
            market="demo",
            nodes="1:3",
            flags="--total 600 --every 10 --sleep-s 0.15 --reduce exact",
            extra=("--secret", f"WANDB_API_KEY={server.key}"),
        )
        c.task.write_text(TASK.format(workdir=tmp_path, trainer=TRAINER, url=server.url))
        c.launch()
        try:
            for step, what in ((60, "worker"), (140, "publisher"), (220, "agent"), (300, "worker")):
                c.until(lambda step=step: c.step() >= step, 400)
                kill_a_publisher(c) if what == "publisher" else c.kill(what, rng)
            assert c.wait(400) == 0, c.logs()
        finally:
            c.close()
        told = Told(str(c.run))
        # of a short run: the killed publisher's claim may still keep the others out
        account = Account(True, server.key, server.url)
        assert sync(told.store, [account], dict(os.environ), 240.0) == []
        (run,) = server.runs.values()
        records = history(c.run)
        rows = [
            (r["train/step"], r["train/loss"], r["_timestamp"])
            for r in lines(run)
            if "train/step" in r
        ]
        assert rows == [(r.step, r.loss, r.t) for r in records]
        assert [r.step for r in records] == list(range(1, 601))
        assert len(run.history) == len(list(every_row(told.store)))
        assert newest_header(told.store).end == "done"
        assert (run.problems, server.misunderstood) == ([], [])
        assert server.state(run.name) == "finished"
        assert set(states) == {"running", "finished"}
        assert len(c.facts(EpochStarted)) >= 6  # five interruptions
        ops = [row for row in run.history if "cost/usd_total" in row]
        ledger = ledger_of(told, ops[-1]["time/unix"])
        assert ops[-1]["cost/usd_total"] == ledger.usd
        assert ops[-1]["goodput/fraction"] == ledger.goodput
        assert [row for row in run.history if "node/1/cpu/percent" in row]
        assert [row for row in run.history if "event/node_lost" in row]
