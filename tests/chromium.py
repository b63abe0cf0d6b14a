"""A headless Chromium that a test drives through its pipe of the DevTools protocol; no driver package is needed."""

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

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=1300,1000")
_ANSWER_S = 300.0


class Browser:
    """One page. `evaluate` runs JavaScript in it; `errors` are what its console complained of."""

    def __init__(self, program: str, profile: str) -> None:
        # Chromium reads commands from descriptor 3 and answers on 4, each message ended by a zero byte.
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        redirect = f'exec {program} "$@" 3<&{command_read} 4>&{answer_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "chromium", *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file, and wait until its scripts have drawn it."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=f"{path.resolve().as_uri()}{fragment}")
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page. Raises AssertionError if it throws."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return as soon as `expression` is true."""
        deadline = time.monotonic() + _ANSWER_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.errors}"
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """The text of every such element."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.textContent)")

    def wait_for(self, selector: str, number: int) -> None:
        """Return as soon as there are so many such elements."""
        self.wait(f"document.querySelectorAll({json.dumps(selector)}).length === {number}")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def change(self, selector: str, value: str, event: str = "change") -> None:
        """Enter or choose a value."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('{event}')); }})({found})")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """`kind`: mousePressed, mouseMoved, mouseReleased."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=clicks)

    @contextmanager
    def window(self, width: int, height: int = 900) -> Iterator[None]:
        """Another size of the window, in pixels, for a while."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        yield
        self._call("Emulation.clearDeviceMetricsOverride")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:2000])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile; the test is skipped where none is installed."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium here: install chromium to see the pages")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()
