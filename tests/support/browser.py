"""A real browser, driven over its debugging pipe: Chromium, without a window.

Where it comes from: ``ROBUST_TRAIN_BROWSER`` (a path), ``just browser`` (a package of npm's
registry that is Chromium for servers, with the libraries it needs), or one that is installed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from world import ROOT

PACKAGE = ROOT / "build" / "browser" / "node_modules" / "@sparticuz" / "chromium"
INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_SECONDS = 60.0
# the browser looks for its pipes at these two descriptors
_WITH_PIPES = """
import fcntl, os, sys
commands, events = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(events, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_UNPACK = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""


def find_browser() -> Path | None:
    named = os.environ.get("ROBUST_TRAIN_BROWSER")
    if named:
        return Path(named)
    if PACKAGE.is_dir() and shutil.which("node"):
        return _unpacked()
    paths_found = filter(None, map(shutil.which, INSTALLED))
    return next((Path(path) for path in paths_found), None)


def _unpacked() -> Path:
    """The package's program and libraries, unpacked beside it at the first use."""
    folder = PACKAGE / "unpacked"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=PACKAGE) as place:
            _inflate(PACKAGE / "bin" / "chromium.br", Path(place, "chromium"))
            Path(place, "chromium").chmod(0o755)
            for name in ("al2023", "swiftshader"):
                packed = Path(place, f"{name}.tar")
                _inflate(PACKAGE / "bin" / f"{name}.tar.br", packed)
                shutil.unpack_archive(packed, place)
            with contextlib.suppress(OSError):  # another process was faster
                Path(place).rename(folder)
                Path(place).mkdir()
    return folder / "chromium"


def _inflate(packed: Path, to: Path) -> None:
    subprocess.run(["node", "-e", _UNPACK, str(packed), str(to)], check=True)


class Browser:
    """A running browser. A context manager."""

    def __init__(self, program: Path) -> None:
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        # the browser may still write there while it ends
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        libraries = [str(program.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        self._process = subprocess.Popen(
            # the sandbox needs rights that containers lack, and all that is shown are our own files
            [
                *(sys.executable, "-c", _WITH_PIPES, str(commands), str(events), str(program)),
                *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
                *(f"--user-data-dir={self._profile.name}", "about:blank"),
            ],
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, libraries))},
            pass_fds=(commands, events),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        self._read = b""
        self._number = 0
        self.told: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._events)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Let the browser do something; what it answers. Events on the way go to ``told``."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            request["sessionId"] = session
        os.write(self._commands, json.dumps(request).encode() + b"\0")
        while True:
            message = self.next_message()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.told.append(message)

    def next_message(self) -> dict[str, Any]:
        """Wait for the next answer or event."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._events], [], [], TIMEOUT_SECONDS)
            assert ready, "the browser does not answer"
            data = os.read(self._events, 1 << 20)
            assert data, f"the browser ended with {self._process.wait()}"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int, dark: bool = False, script: bool = True) -> Page:
        """Show a file in a window of this size, in pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **window)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Emulation.setScriptExecutionDisabled", value=not script)
        page.load(path.resolve().as_uri())
        return page


class Page:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.uri = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """See :meth:`Browser.call`."""
        return self._browser.call(method, self._session, **parameters)

    def load(self, uri: str) -> None:
        """Go to an address and wait until the page is complete."""
        self.uri = uri
        before = len(self._of("Page.loadEventFired"))
        self.call("Page.navigate", url=uri)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self._of("Page.loadEventFired")) == before:
            assert time.monotonic() < deadline, f"never loaded: {uri}"
            self._browser.told.append(self._browser.next_message())

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [
            message["params"]
            for message in self._browser.told
            if message.get("sessionId") == self._session and message.get("method") == method
        ]

    @property
    def complaints(self) -> list[Any]:
        """All that the console shows, and exceptions of scripts."""
        self.evaluate("1")  # what was said before is now here
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for kind in kinds for event in self._of(kind)]

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for, the page itself left out."""
        urls = [event["request"]["url"] for event in self._of("Network.requestWillBeSent")]
        return [url for url in urls if url != self.uri]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Evaluate an expression until its value is true; return the value."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
        return value

    def point_at(self, x: float, y: float, button: str = "none") -> None:
        """Move the pointer, with a button held down if one is named."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button=button)

    def press(self, what: str, x: float, y: float, clicks: int = 1) -> None:
        """Press or release the left button: ``mousePressed`` or ``mouseReleased``."""
        self.call("Input.dispatchMouseEvent", type=what, x=x, y=y, button="left", clickCount=clicks)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def screenshot(self) -> Image.Image:
        """The whole page, what is below the window included."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return Image.open(io.BytesIO(base64.b64decode(answer["data"])))
