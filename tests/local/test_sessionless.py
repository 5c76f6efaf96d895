"""A plain script that nothing adopts, under `harness launch`: everybody is told that it is not
saved, and the run fails unless that is wanted."""

import pytest

from harness.core.facts import NOT_ELASTIC, RunEnded, Warned
from support.campaign import Campaign
from support.whole_runs import harness

pytestmark = pytest.mark.proof

TRAINS = """\
import time
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
print('trained by myself')
"""


@pytest.fixture
def launched(tmp_path):
    def launch(script: str, *extra: str) -> tuple[Campaign, int]:
        trainer = tmp_path / "plain.py"
        trainer.write_text(script)
        campaign = Campaign(tmp_path, nodes="1", trainer=trainer, extra=extra)
        try:
            campaign.launch()
            return campaign, campaign.wait()
        finally:
            campaign.close()

    return launch


def told(campaign: Campaign, *command: str) -> str:
    """Return what a command says of the run, on one line."""
    return " ".join(harness(*command, campaign.run).stdout.split())


def test_a_script_without_a_session_ends_the_run_as_failed_within_seconds(launched):
    campaign, code = launched(TRAINS.format(steps=10_000))  # 500 s, if nothing ends it
    screen = campaign.output()
    assert code == 1, campaign.logs()
    assert NOT_ELASTIC in screen and "--unmanaged" in screen, screen
    assert "step 0 is the last" not in screen
    (ended,) = campaign.facts(RunEnded)
    assert ended.outcome == "failed" and "harness.attach()" in ended.reason
    (warned,) = campaign.facts(Warned)
    assert warned.what.startswith(NOT_ELASTIC)
    for command in (("status", "--once"), ("runs", "report"), ("runs", "alerts")):
        assert NOT_ELASTIC in told(campaign, *command), command


def test_one_that_makes_no_step_fails_at_its_end(launched):
    campaign, code = launched("print('trained by myself')\n")
    assert code == 1, campaign.logs()
    (ended,) = campaign.facts(RunEnded)
    assert ended.outcome == "failed" and ended.reason.startswith(NOT_ELASTIC)


def test_an_unmanaged_one_is_done_and_never_said_to_be_saved(launched):
    campaign, code = launched(TRAINS.format(steps=20), "--unmanaged")
    screen = campaign.output()
    assert code == 0, campaign.logs()
    assert NOT_ELASTIC in screen and "step 0 is the last" not in screen
    (ended,) = campaign.facts(RunEnded)
    assert ended.outcome == "done"
    assert "nothing is saved in the run" in ended.reason
