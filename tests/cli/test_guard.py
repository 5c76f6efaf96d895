"""`harness guard`: what is forgotten is named, and ended on request."""

from __future__ import annotations

import pytest

from harness.cli import account_commands
from harness.cli.common import DONE, FAILED
from harness.core.world import BadInput
from support.account import LIVE, OVER, Account, account


def test_what_is_forgotten_is_named_and_ended(monkeypatch, capsys):
    sky = account()
    monkeypatch.setattr(account_commands, "sky_broker", lambda url: sky)
    monkeypatch.setattr(account_commands, "_has_ended", {OVER: True, LIVE: False}.get)
    assert account_commands.guard(account_commands.GuardFlags()) == FAILED
    said = capsys.readouterr().out
    assert said.count("FORGOTTEN") == 3 and "harness guard --end mine" in said
    with pytest.raises(BadInput, match="found nobody"):
        account_commands.guard(account_commands.GuardFlags(end="nobody"))
    assert account_commands.guard(account_commands.GuardFlags(end_idle=True)) == DONE
    assert {row["name"] for row in sky.clusters("")} == {"gpt-abcdefghi-0001", "half"}
    assert account_commands.guard(account_commands.GuardFlags()) == DONE


def test_an_empty_account_is_said_to_be_so(monkeypatch, capsys):
    monkeypatch.setattr(account_commands, "sky_broker", lambda url: Account())
    assert account_commands.guard(account_commands.GuardFlags()) == DONE
    assert "No cluster" in capsys.readouterr().out
