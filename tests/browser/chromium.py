"""A headless Chromium driven by its DevTools protocol over two pipes: no driver, no packages.

    with Chromium.start() as browser:
        browser.open(path, width=1366, height=900)
        browser.evaluate("document.title")
        browser.move(x, y)

Commands go to the browser's file descriptor 3, answers come from 4: JSON, ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser's program, or None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._pending = b""
        self._session: str | None = None
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[Chromium]:
        program = find()
        assert program is not None, "ask find() first"
        with tempfile.TemporaryDirectory() as profile:
            commands, to_browser = os.pipe()
            from_browser, answers = os.pipe()
            shell = f'exec "$@" 3<&{commands} 4>&{answers}'
            process = subprocess.Popen(
                ["bash", "-c", shell, "-", program, *FLAGS, f"--user-data-dir={profile}"],
                pass_fds=(commands, answers),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            os.close(commands)
            os.close(answers)
            try:
                browser = cls(to_browser, from_browser)
                yield browser
                browser._session = None
                browser.call("Browser.close")
                process.wait(10)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                os.close(to_browser)
                os.close(from_browser)

    def call(self, method: str, within: float = 30.0, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are looked at on the way."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + within
        while True:
            message = self._receive(until)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(self, path: Path, width: int, height: int, *, phone: bool = False) -> None:
        """Opens a page in a window of that size and waits until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, expression: str, within: float = 20.0) -> Any:
        """Waits until an expression is true, and gives its value."""
        end = time.monotonic() + within
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {within} s: {expression}")
            time.sleep(0.05)
        return value

    def move(self, x: float, y: float) -> None:
        """Moves the mouse, in two steps, as a hand does."""
        for step in (-3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)

    def click(self, x: float, y: float) -> None:
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser gives no answer")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("the browser has gone")
            self._pending += more
        raw, self._pending = self._pending.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        """Keeps what a page should never say: errors, and requests beyond the file itself."""
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.messages.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = told["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.messages.append(f"a request to {url}")
