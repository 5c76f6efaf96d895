"""A plain script that nothing adopts, under `harness launch`: everybody is told that it is not
saved."""

from harness.core.facts import RunEnded, Warned
from harness.look.alerts.alert_rules import BUILT_IN
from support.campaign import Campaign
from support.whole_runs import harness


def test_a_script_without_a_session_is_never_called_done_at_step_0(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('trained by myself')\n")
    campaign = Campaign(tmp_path, nodes="1", trainer=script)
    try:
        campaign.launch()
        assert campaign.wait() == 0, campaign.logs()
        screen = campaign.output()
    finally:
        campaign.close()
    assert "step 0 is the last" not in screen
    assert "nothing is saved in the run" in screen
    assert "the script has no session: nothing of it is saved" in screen
    (ended,) = campaign.facts(RunEnded)
    assert ended.reason == (
        "the script exited 0 and had no session: its steps were not counted, nothing is saved in "
        "the run"
    )
    (warned,) = campaign.facts(Warned)
    assert "harness.attach()" in warned.what
    assert [rule.name for rule in BUILT_IN if Warned in rule.kinds] == ["promise-weakened"]
    told = harness("status", campaign.run).stdout
    assert "has no session" in told.replace("\n", " "), told
