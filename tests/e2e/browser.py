"""A headless Chromium for tests, driven over a pipe with the DevTools protocol: no package, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from children import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Chromium:
    """The browser's process, for one page at a time; a test that asks for it is skipped where there is none."""

    def __init__(self, profile: Path) -> None:
        if CHROMIUM is None:
            pytest.skip("there is no Chromium on this machine")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def wire() -> None:  # the browser reads commands from descriptor 3 and answers on 4
            spare = [os.dup(theirs_in), os.dup(theirs_out)]
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"], preexec_fn=wire, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._rest, self._count = ours_in, ours_out, b"", 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def send(self, **asked) -> int:
        """Send a command; returns its number."""
        self._count += 1
        os.write(self._out, json.dumps({"id": self._count, **asked}).encode() + b"\0")
        return self._count

    def read(self):
        """The next answer or event."""
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], PATIENCE)[0], f"the browser says nothing ({self.process.poll()})"
            got = os.read(self._in, 1 << 20)
            assert got, "the browser is gone"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


class Browser:
    """One page, with nothing left of the page before it.

    `problems` collects what it complains of: exceptions, console errors and warnings, failed requests.
    """

    def __init__(
        self, chromium: Chromium, width: int = 1200, height: int = 900, dark: bool = False, offline: bool = True
    ) -> None:
        self._chromium, self.dark = chromium, dark
        self.problems: list[str] = []
        self._session = None
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        self._page = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        if offline:
            self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        )
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640)

    def open(self, address: str, ready: str) -> None:
        """Go there and wait until an expression holds."""
        self.call("Page.navigate", url=address)
        self.wait(ready)

    def wait(self, expression: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < until, f"never: {expression}; {self.problems}"
            time.sleep(0.05)

    def ask(self, expression: str):
        """The value of an expression in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def click(self, selector: str) -> None:
        """The real mouse on the middle of an element, scrolled into view."""
        pick = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{pick}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})")
        at = self.ask(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({pick}.getBoundingClientRect())")
        self.click_at(*at)

    def click_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        time.sleep(0.2)  # a chart looks for what lies under the mouse before it takes a click
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def shot(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._session = None
        self.call("Target.disposeBrowserContext", browserContextId=self._context)

    def call(self, method: str, **params):
        whose = {"sessionId": self._session} if self._session else {}
        number = self._chromium.send(method=method, params=params, **whose)
        while True:
            said = self._chromium.read()
            if said.get("id") == number:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            if said.get("sessionId") == self._session:
                self._note(said)

    def _note(self, event) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(about["exceptionDetails"])[:400])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(about["args"])[:400])
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.problems.append(about["entry"]["text"])
            case "Network.loadingFailed":
                self.problems.append(about["errorText"])
