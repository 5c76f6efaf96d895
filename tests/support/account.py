"""An account with clusters of every kind: one trains, others are forgotten."""

from __future__ import annotations

from support.fakesky import FakeSky

OVER, LIVE = "s3://b/over", "s3://b/live"
RESOURCES = {"infra": "aws/us-east-1"}


class Account(FakeSky):
    """Its clusters end at once."""

    def down(self, name: str) -> str:
        asked = super().down(name)
        self.tick(100.0)
        return asked

    def close(self) -> None:
        pass


def account() -> Account:
    made = Account()
    for name, run, idle_minutes in (
        ("gpt-abcdefghi-0001", LIVE, 10),
        ("gpt-abcdefghi-0002", OVER, 10),
        ("mine", None, None),
        ("notebook", None, None),
        ("half", None, None),
    ):
        envs = {"RUN": run} if run else {}
        made.launch(name, {"envs": envs, "resources": RESOURCES}, {}, idle_minutes)
    made.tick(3600.0)
    made.end_job("mine", "SUCCEEDED")
    made.jobs["notebook"] = None
    made.take_away("half")  # the node itself does not answer
    return made
