"""What a process says when it fails: tracebacks, threads and logs, without its secrets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from storage.http_server import BoundedHandler
from support.planted import FORMS, PLANTED, leaks

SCRIPT = """
import logging, os, sys, threading, time
from harness.core.masking import keep_secrets
keep_secrets(os.environ)
keep_secrets(os.environ)
names = {names!r}
said = " ".join([os.environ[n] for n in names]) + " https://me:{url}@host/x {hf}"

def fails():
    raise RuntimeError("refused: " + said) from OSError(said)

class Last:
    def __del__(self):
        fails()

log = logging.getLogger("some.library")
if "basic" in sys.argv:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
log.warning("asked with %s", said)
log.warning("my_token = 'q1w2e3r4t5y6u7'", stack_info=True)
try:
    fails()
except RuntimeError:
    log.exception("caught %s", said)
last = Last()
del last
threads = [threading.Thread(target=fails) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print("stderr is", sys.stderr.name, file=sys.stderr)
fails()
"""


@pytest.mark.parametrize("basic", ["basic", "bare"])
def test_no_secret_is_in_what_a_failing_process_says(basic: str) -> None:
    names = [n for n in PLANTED if n != "PLAINLY"]
    script = SCRIPT.format(names=names, **FORMS)
    env = {**os.environ, **PLANTED, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script, basic], env=env, capture_output=True, timeout=120
    )
    text = done.stderr.decode()
    assert leaks(done.stderr + done.stdout) == [] and "q1w2e3" not in text
    assert done.returncode == 1
    assert text.count("RuntimeError: refused: ***") == 7, text  # del, log, 4 threads, the end
    assert "asked with ***" in text and "stderr is <stderr>" in text
    assert 'File "<string>", line' in text and "in fails" in text


def test_a_server_whose_handler_fails_tells_it_as_its_process_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from storage.http_server import BoundedHTTPServer

    told: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: told.append(error))
    server = BoundedHTTPServer("127.0.0.1", 0, BoundedHandler)
    try:
        raise KeyError("a")
    except KeyError:
        server.handle_error(None, None)
    finally:
        server.server_close()
    assert [repr(error) for error in told] == ["KeyError('a')"]
