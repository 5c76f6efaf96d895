"""What a process has learned to be a secret is masked wherever it stands, and nothing else is."""

from __future__ import annotations

import base64
import dataclasses
import json
import re

import pytest

from harness.core import facts, masking
from harness.core.masking import masked, masked_deep
from support.planted import PLANTED, leaks


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


def test_a_fact_with_anything_but_numbers_is_masked(learned: None) -> None:
    """Only the lines of facts whose fields are all numbers are written as they are."""
    secret = "abcdefgh-12345"
    masking.keep_out([secret])
    bare = {kind for kind in facts.KINDS if facts.holds_numbers_only(kind)}
    assert "StepDone" in bare
    for kind, cls in facts.KINDS.items():
        fact, fields = object.__new__(cls), dataclasses.fields(cls)
        words = {f.name for f in fields if re.search(r"str|tuple|list|dict|Any", str(f.type))}
        assert bool(words) is (kind not in bare), kind
        for f in fields:
            object.__setattr__(fact, f.name, [{secret: secret}] if f.name in words else 1)
        line = facts.Chain("w").line(1.0, fact)
        assert (secret in line) is False, kind
        assert ("***" in line) is bool(words), kind


KEY_LINES = (
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "BKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj",
    "Zk3fQ9xT2wLr8PqY0aBcDeFg",
)
PEM = "\n".join(("-----BEGIN PRIVATE KEY-----", *KEY_LINES, "-----END PRIVATE KEY-----"))
OF_SERVICES = {
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=acc;"
    "AccountKey=Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MA==;EndpointSuffix=core.windows.net",
    "PGPASSWORD": "pg-9f8e7d6c5b",
    "DB_PASS": "db-1a2b3c4d5e",
    "MYSQL_PWD": "my-0z9y8x7w6v",
    "SLACK_WEBHOOK_URL": "https://hooks.slack.com/services/T000/B000/XyZ123abc",
    "SENTRY_DSN": "https://0123456789ab@o1.ingest.sentry.io/42",
    "DATABASE_CONN": "host=h user=u password=in-a-conn-1",
    "SSH_PASSPHRASE": "open-sesame-77",
    "SIGNING_KEY": PEM,
    "GOOGLE_CREDENTIALS": json.dumps({"type": "service_account", "private_key": PEM}),
}


@pytest.mark.parametrize("name", OF_SERVICES)
def test_secrets_of_well_known_services_are_learned_by_their_names(
    learned: None, name: str
) -> None:
    masking.learn({name: OF_SERVICES[name]})
    assert OF_SERVICES[name] not in masked(f"failed with {OF_SERVICES[name]} at once")


def test_what_is_secret_within_a_value_is_masked_alone(learned: None) -> None:
    """A key is printed line by line, and a client quotes the key of its connection string only."""
    masking.learn(OF_SERVICES)
    for line in (*KEY_LINES, "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MA==", "in-a-conn-1"):
        assert masked(f"x {line} y") == "x *** y", line
    assert "-----BEGIN" not in masking._learned
    assert masked("host=h user=u, service_account, core.windows.net") == (
        "host=h user=u, service_account, core.windows.net"
    )


@pytest.mark.parametrize("around", ["", "a", "ab", "abc", "user:"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_of_a_secret_is_masked_wherever_it_begins(learned, around, encode) -> None:
    secret = OF_SERVICES["PGPASSWORD"]
    masking.learn({"PGPASSWORD": secret})
    text = masked(encode(f"{around}{secret}{around}".encode()).decode())
    assert "***" in text
    left = text.replace("***", "")
    assert len(left) <= 4 * -(-(2 * len(around) + 6) // 3)  # nothing of it but the edges


def test_folders_and_flags_are_no_secrets(learned: None) -> None:
    masking.learn(
        {"PWD": "some-folder-here", "OLDPWD": "other-folder-here", "GRADIENT_PASSES": "many-of-them",
         "NVIDIA_PASSTHROUGH": "enabled-here", "CONNECT_TIMEOUT": "forever-and-a-day", "MAX_CONNECTIONS": "as-many-as"}
    )  # fmt: skip
    assert masking._learned == []
