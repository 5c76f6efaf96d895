"""Runs of corpus_trainer.py, and what they say of themselves."""

from pathlib import Path

from support.worlds import history

SCRIPT = str(Path(__file__).parents[1] / "support" / "corpus_trainer.py")


def said(run):
    return [(r.step, r.digest, r.contents, r.loss) for r in history(run)]
