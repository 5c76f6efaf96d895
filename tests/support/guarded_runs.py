"""Runs of the guarded trainer, for the tests of guards."""

import json
import subprocess
import sys
from functools import lru_cache

import numpy as np

from harness.bucket.archive import read_facts
from harness.core.batch import Batching, indices_at, plan
from storage.stores.store_urls import open_store
from support import guarded_trainer
from support.guarded_trainer import GLOBAL, MICRO, SAMPLES, TOTAL
from support.worlds import environment, train

SCRIPT = guarded_trainer.__file__
SETTINGS = {"warm_up": 10, "window": 32, "most_bad": 20}


def guarded(run, world, *flags, codes=(0,), **kwargs):
    """Train, and return what the training ended with: (weights, ...), and the output."""
    out = run.with_suffix(".json")
    ended = train(run, world, *flags, "--out", out, script=SCRIPT, codes=codes, **kwargs)
    return json.loads(out.read_text()) if out.exists() else {}, ended.output


def facts(run, kind):
    return [s.fact for s in read_facts(open_store(str(run))) if isinstance(s.fact, kind)]


def under_an_agent(run, *words):
    command = [sys.executable, "-m", "harness.cli", "run", "--run", str(run), "--nproc", "2", *words]
    return subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@lru_cache
def comes(sample):
    """The steps with this sample, and the micro-batch that it is in."""
    at = indices_at(Batching(SAMPLES, GLOBAL, MICRO, 1), np.arange(GLOBAL * TOTAL)).tolist()
    places = [divmod(k, GLOBAL) for k, index in enumerate(at) if index == sample]
    return {step + 1: within // MICRO for step, within in places}


def owner(micro, world):
    shares = plan(GLOBAL // MICRO, world)
    return next(rank for rank in range(world) if micro in shares.micros(rank))
