"""Pages in a real browser without a window: Playwright drives the system's Chromium."""

import json
import shutil
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESK = (1280, 900)
PHONE = (390, 844)
TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


def found() -> str | None:
    """The program of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page in the browser.

    - `errors`: what was written to the console as an error, thrown or refused
    - `requests`: addresses other than the page's own that were asked for
    """

    def __init__(self, page: Any, address: str):
        self.page, self.errors, self.requests = page, [], []
        self._own = address.partition("#")[0]
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._heard)
        page.on("request", self._asked)
        page.goto(address)
        self.settle()

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if request.url.partition("#")[0] != self._own:
            self.requests.append(request.url)

    def settle(self) -> None:
        """Until two frames were drawn."""
        self.value(TWO_FRAMES)

    def value(self, script: str) -> Any:
        """What a script comes to, as JSON; fails if it throws."""
        return self.page.evaluate(script)

    def wait(self, condition: str) -> None:
        """Until a condition holds; fails after a minute."""
        self.value(
            "new Promise((done, fail) => { const last = Date.now() + 60000, look = () => {"
            f"if ({condition}) done(1); else if (Date.now() < last) setTimeout(look, 20);"
            f"else fail(new Error({json.dumps(condition)})); }}; look(); }})"
        )

    def hover(self, x: float, y: float) -> None:
        self.page.mouse.move(x - 2, y)
        self.page.mouse.move(x, y)
        self.settle()

    def drag(self, begin: float, end: float, y: float) -> None:
        self.page.mouse.move(begin, y)
        self.page.mouse.down()
        self.page.mouse.move(end, y, steps=3)
        self.page.mouse.up()
        self.settle()

    def swipe(self, begin: float, end: float, y: float) -> None:
        """A finger from one place to another."""
        tools = self.page.context.new_cdp_session(self.page)
        for kind, places in (("Start", [begin]), ("Move", [(begin + end) / 2]), ("Move", [end]), ("End", [])):
            points = [{"x": x, "y": y} for x in places]
            tools.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
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

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()


class Browser:
    """A Chromium that runs until its owner closes it."""

    def __init__(self, chromium: Any):
        self._chromium = chromium

    def open(self, path: Path | str, size: tuple[int, int] = DESK, dark: bool = False, fragment: str = "") -> Tab:
        """A file or address, when it has loaded; nothing may be asked of the network."""
        address = path if isinstance(path, str) else path.resolve().as_uri()
        scheme, is_phone = "dark" if dark else "light", size[0] < 600
        viewport = {"width": size[0], "height": size[1]}
        page = self._chromium.new_page(viewport=viewport, color_scheme=scheme, is_mobile=is_phone, has_touch=is_phone)
        return Tab(page, address + fragment)
