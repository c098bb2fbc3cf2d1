"""A real browser without a window, driven through its DevTools protocol over two pipes: no network, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # root has none in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
SECONDS = 60
SILENT_SECONDS = 300  # of a browser that does not answer any more, on a machine that has much else to do
DESK = (1280, 900)
PHONE = (390, 844)


def found() -> str | None:
    """The program of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A Chromium that runs until it is closed."""

    def __init__(self, program: str, folder: Path):
        to_read, to_us = os.pipe()
        from_us, to_write = os.pipe()
        # The protocol's pipes are the descriptors 3 and 4 of the browser.
        command = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "browser", program, *FLAGS]
        with open(folder / "browser.log", "wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                pass_fds=(from_us, to_us),
                stdout=log,
                stderr=log,
            )
        os.close(from_us)
        os.close(to_us)
        self._read, self._write = os.fdopen(to_read, "rb", buffering=0), os.fdopen(to_write, "wb", buffering=0)
        self._last, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what happens meanwhile goes to `events`."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        self._write.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            got = self.next()
            if got.get("id") == self._last:
                assert "error" not in got, got
                return got["result"]
            self.events.append(got)

    def next(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], SILENT_SECONDS)[0], "the browser does not answer"
            piece = self._read.read(1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read.close()
        self._write.close()

    def open(self, path: Path, size: tuple[int, int] = DESK, dark: bool = False, fragment: str = "") -> "Tab":
        """A page, when it has loaded; nothing may be asked of the network."""
        return Tab(self, path.resolve().as_uri() + fragment, size, dark)


class Tab:
    """A page in the browser.

    - `errors`: what was written to the console as an error, thrown or refused
    - `requests`: addresses other than the page's own that were asked for
    """

    def __init__(self, browser: Browser, address: str, size: tuple[int, int], dark: bool):
        self._browser = browser
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self._target, browser.events[:] = target, []
        self._session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.resize(size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)
        loaded = {"loaderId": self.ask("Page.navigate", url=address)["loaderId"], "name": "load"}
        self._address = address.partition("#")[0]
        # Of this address: the empty page that a tab begins with may be loaded late too.
        while not any(each["params"].items() >= loaded.items() for each in self._own_events()):
            browser.events.append(browser.next())
        self.settle()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        mobile = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def settle(self) -> None:
        """Until two frames were drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, script: str) -> Any:
        """What a script comes to, as JSON; fails if it throws."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        button = "left" if kind != "mouseMoved" or pressed else "none"
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(pressed), clickCount=1)

    def hover(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x - 2, y)
        self.mouse("mouseMoved", x, y)
        self.settle()

    def drag(self, begin: float, end: float, y: float) -> None:
        self.mouse("mouseMoved", begin, y)
        self.mouse("mousePressed", begin, y, pressed=True)
        for x in (begin + 10, (begin + end) / 2, end):
            self.mouse("mouseMoved", x, y, pressed=True)
        self.mouse("mouseReleased", end, y)
        self.settle()

    def swipe(self, begin: float, end: float, y: float) -> None:
        """A finger from one place to another."""
        self.ask("Emulation.setTouchEmulationEnabled", enabled=True)
        for kind, places in (
            ("touchStart", [begin]),
            ("touchMove", [(begin + end) / 2]),
            ("touchMove", [end]),
            ("touchEnd", []),
        ):
            self.ask("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x in places])
        self.settle()

    def choose(self, control: str, value: str | bool) -> None:
        """Sets a control as a reader would."""
        attribute = "checked" if isinstance(value, bool) else "value"
        self.value(
            f"(() => {{ const it = document.getElementById({json.dumps(control)});"
            f"it.{attribute} = {json.dumps(value)};"
            "it.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        self.settle()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def errors(self) -> list[str]:
        wrong = []
        for each in self._own_events():
            method, about = each["method"], each["params"]
            if method == "Runtime.exceptionThrown":
                wrong.append(str(about["exceptionDetails"]))
            if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                wrong.append(str(about["args"]))
            if method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                wrong.append(about["entry"]["text"])
        return wrong

    @property
    def requests(self) -> list[str]:
        asked = [each for each in self._own_events() if each["method"] == "Network.requestWillBeSent"]
        addresses = [each["params"]["request"]["url"] for each in asked]
        return [address for address in addresses if address.partition("#")[0] != self._address]

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_events(self) -> list[dict[str, Any]]:
        return [each for each in self._browser.events if each.get("sessionId") == self._session]
