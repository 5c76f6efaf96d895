"""A headless Chromium for tests, spoken to over its DevTools protocol by a pipe: no other package
is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ANSWER_WITHIN_S = 60.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Tab:
    """One page of a browser. `said`: what its console got, and errors, and resources that did not
    load."""

    def __init__(self, browser: Browser, session: str):
        self.browser, self.session, self.said = browser, session, list[str]()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, params, self.session)

    def open(self, url: str) -> None:
        self.said.clear()
        self.browser.loaded.discard(self.session)
        self.call("Page.navigate", url=url)
        self.browser.wait(lambda: self.session in self.browser.loaded)

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + ANSWER_WITHIN_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"not true within {ANSWER_WITHIN_S:g} s: {script}"
            time.sleep(0.05)

    def size(self, width: int, height: int, touch: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=touch,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)

    def media(self, kind: str = "", **features: str) -> None:
        """`kind`: "print"; `features`: prefers_color_scheme="dark"."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", media=kind, features=named)

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> str:
        """What the tooltip says with the pointer at a share of an element's box; "" if hidden."""
        at = self._at(selector, x, y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        return str(self.run("(t=>t&&!t.hidden?t.textContent:'')(document.getElementById('tip'))"))

    def touch(self, selector: str, x: float = 0.5, y: float = 0.5) -> str:
        at = self._at(selector, x, y)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[at])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        return str(self.run("(t=>t&&!t.hidden?t.textContent:'')(document.getElementById('tip'))"))

    def _at(self, selector: str, x: float, y: float) -> dict[str, float]:
        box = self.run(
            f"(e=>{{document.documentElement.style.scrollBehavior='auto';"
            "e.scrollIntoView({block:'center'});const b=e.getBoundingClientRect();"
            f"return [b.left,b.top,b.width,b.height]}})(document.querySelector({selector!r}))"
        )
        self.run("new Promise(done=>requestAnimationFrame(()=>requestAnimationFrame(done)))")
        return {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}

    def picture(self, path: Path, whole: bool = True) -> None:
        more: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more["clip"] = {"x": 0, "y": 0, "scale": 1, **{k: size[k] for k in ("width", "height")}}
        found = self.call("Page.captureScreenshot", format="png", **more)
        path.write_bytes(base64.b64decode(found["data"]))

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


class Browser:
    """`call` sends a command and reads until its answer; events are kept on the way."""

    def __init__(self, folder: str):
        here_in, there_out = os.pipe()
        there_in, here_out = os.pipe()

        def wire() -> None:
            os.dup2(os.dup(there_in), 3)
            os.dup2(os.dup(there_out), 4)

        # both ends must not lie at 3 and 4 themselves while they are copied there
        there_in, there_out = (_above(fd) for fd in (there_in, there_out))
        self._process = subprocess.Popen(
            [str(program()), *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=wire, pass_fds=(3, 4), env={**os.environ, "HOME": folder},
        )  # fmt: skip
        os.close(there_in)
        os.close(there_out)
        self._in, self._out, self._rest, self._number = here_in, here_out, b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self.loaded: set[str] = set()

    def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        body: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        body |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(body).encode() + b"\0")
        number = self._number
        self.wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def wait(self, ready: Any) -> None:
        end = time.monotonic() + ANSWER_WITHIN_S
        while not ready():
            left = end - time.monotonic()
            assert left > 0, f"Chromium did not answer within {ANSWER_WITHIN_S:g} s"
            if select.select([self._in], [], [], left)[0]:
                data = os.read(self._in, 1 << 20)
                assert data, "Chromium has ended"
                *whole, self._rest = (self._rest + data).split(b"\0")
                for text in whole:
                    self._take(json.loads(text))

    def _take(self, body: dict[str, Any]) -> None:
        if "id" in body:
            self._answers[body["id"]] = body
            return
        session, params = body.get("sessionId", ""), body.get("params", {})
        said = self._tabs[session].said if session in self._tabs else []
        match body["method"]:
            case "Page.loadEventFired":
                self.loaded.add(session)
            case "Runtime.consoleAPICalled":
                said.append(f"console.{params['type']}: {params['args']}")
            case "Runtime.exceptionThrown":
                said.append(f"exception: {params['exceptionDetails']}")
            case "Log.entryAdded":
                said.append(f"{params['entry']['level']}: {params['entry']['text']}")
            case "Network.loadingFailed" if not params.get("canceled"):
                said.append(f"not loaded: {params.get('errorText')}")

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        tab = object.__new__(Tab)
        self._tabs[session] = tab
        Tab.__init__(tab, self, session)
        return tab

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close", {})
        for fd in (self._in, self._out):
            os.close(fd)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)


def _above(fd: int) -> int:
    """The same pipe under a number that is not wanted for another."""
    import fcntl

    found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return found


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        one = Browser(folder)
        try:
            yield one
        finally:
            one.close()
