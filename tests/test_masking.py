"""What a process has learned to be a secret is masked wherever it stands, and nothing else is."""

from __future__ import annotations

import json

import pytest
from test_secrets import PLANTED, leaks

from harness.core import masking
from harness.core.masking import masked, masked_deep


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_learned", [])


def test_what_is_learned_is_masked_everywhere(learned: None) -> None:
    masking.learn({**PLANTED, masking.SECRET_NAMES: "PLAINLY", "TOKEN_FILE": "/run/secrets/token"})
    body = {"a": [f"x {value} y" for value in PLANTED.values()], "b": {"c": 5, "d": "/run/secrets/token"}}
    told = masked_deep(body)
    assert leaks(json.dumps(told).encode()) == []
    assert told["b"] == {"c": 5, "d": "/run/secrets/token"}
    assert masked("https://h/x?token=abcdefgh123&y=1") == "https://h/x?token=***&y=1"


def test_short_words_and_other_variables_are_left_alone(learned: None) -> None:
    masking.learn({"KEY": "x", "TOKENIZERS_PARALLELISM": "disabled-for-now", "PWD": "some-folder-here"})
    assert masked("x disabled-for-now some-folder-here") == "x disabled-for-now some-folder-here"
