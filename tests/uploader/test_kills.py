"""A small part of `make campaign`."""

import pytest

from storage.snapshots import upload
from support import kill_campaign, node_lives

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("role", kill_campaign.ROLES)
def test_a_few_kills_leave_the_newest_snapshot_whole(role, monkeypatch):
    # when the others are killed need not be typical here
    monkeypatch.setattr(node_lives, "_usual_s", [0.1] * 3)
    found = kill_campaign.kills((role,), points=3, seed=7, jobs=1, say=lambda text: None)[role]
    assert found["killed"] > 0


def test_some_calls_fail_once():
    assert sum(kill_campaign.every_call(("before", "after", "torn"), every=9).values()) > 15


@pytest.mark.parametrize("how", kill_campaign.DAMAGE)
def test_damage_is_caught_and_the_next_older_snapshot_used(how):
    assert [kill_campaign.damaged(how, seed) for seed in range(8)] == [(True, True)] * 8


def test_the_check_can_fail(monkeypatch):
    """A commit that is reported and then lost is found."""
    monkeypatch.setattr(upload.Uploader, "_is_old", lambda self, one: False)
    real = kill_campaign.short_run

    def loses(store):
        committed = real(store)
        for key in store.list("snapshots/manifests/"):
            getattr(store, "inner", store).delete(key)
        return committed

    monkeypatch.setattr(kill_campaign, "short_run", loses)
    with pytest.raises(node_lives.Broken, match="was reported"):
        kill_campaign.every_call(("before",), every=50)
