"""Processes beside rank 0: one that dies is told and started again, ever more slowly."""

import signal
import time

from harness.agent.host import AGAIN_S, Helpers
from harness.agent.workers import AgentConfig, HelperConfig


def until(true, limit_s=60.0):
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_helper_that_dies_is_told_and_started_again(tmp_path):
    beside = HelperConfig(alerts="http://127.0.0.1:9/S3CRET", alert_rules="/nowhere.yaml")
    config = AgentConfig((tmp_path / "run").as_uri(), ["x.py"], 1, 1, "127.0.0.1", tmp_path)
    config = AgentConfig(**{**vars(config), "beside": beside})
    assert "S3CRET" not in repr(config)
    helpers = Helpers(config)
    try:
        helpers.start()
        keeper, alerts = (helpers._helpers[name].process for name in ("keeper", "alerts"))
        assert "S3CRET" not in " ".join(map(str, alerts.args))
        keeper.send_signal(signal.SIGKILL)
        until(lambda: keeper.poll() is not None and alerts.poll() is not None)
        found = helpers.look(100.0)
        # wrong input is told once, and is not tried again
        assert sorted(found) == [("alerts", 2, "wrong input"), ("keeper", -9, "SIGKILL")]
        assert helpers.look(100.0 + AGAIN_S - 1) == []
        assert helpers.look(100.0 + AGAIN_S) == []
        again = helpers._helpers["keeper"].process
        assert again is not keeper and again.poll() is None
        again.send_signal(signal.SIGKILL)
        again.wait(20)
        assert helpers.look(200.0) == [("keeper", -9, "SIGKILL")]
        assert helpers.look(200.0 + AGAIN_S) == [] and helpers._helpers["keeper"].process is again
        helpers.look(200.0 + 2 * AGAIN_S)
        assert helpers._helpers["keeper"].process is not again
        helpers.release()
        assert "keeper" not in helpers._helpers
    finally:
        helpers.end(20.0)
