"""Pages in a real browser without a window: Playwright drives the system's Chromium.

What is asked of every page: nothing wrong in its console, curves there, room on a phone, contrast.
"""

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
        """Until a condition holds; fails after a minute, also where looking for it throws."""
        self.value(
            "new Promise((done, fail) => { const last = Date.now() + 60000, look = () => {"
            f"let why = null; try {{ if ({condition}) return done(1); }} catch (error) {{ why = error; }}"
            f"if (Date.now() < last) setTimeout(look, 20);"
            f"else fail(why || new Error({json.dumps(condition)})); }}; look(); }})"
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

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.page.close()
        assert kind or self.errors == []


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


LEAST_CONTRAST = 4.5

# Texts whose contrast with what is behind them is too low, as [text, ratio].
CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const linear = c => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = colour => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => sum + share * linear(colour[i]), 0);
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const wrong = [];
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join("").trim();
    if (!text || !element.checkVisibility()) continue;
    if (["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const ground = behind(element), ink = over(rgba(getComputedStyle(element).color), ground);
    const [a, b] = [light(ink), light(ground)], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < LEAST) wrong.push([element.tagName, text.slice(0, 40), ratio]);
  }
  return wrong;
})()""".replace("LEAST", str(LEAST_CONTRAST))

# Of each chart how many of its pixels have another colour than its ground, or the text that stands in its place.
DRAWN = """[...document.querySelectorAll("figure[data-chart]")].map(figure => {
  const name = figure.dataset.chart, nothing = figure.querySelector(".nothing");
  const canvas = figure.querySelector("canvas");
  if (nothing) return [name, nothing.textContent];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let pixels = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b, a] = data.subarray(i, i + 4);
    if (a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 60) pixels += 1;
  }
  return [name, pixels];
})"""


def drawn(tab: Tab) -> dict[str, Any]:
    """By chart its coloured pixels, or what it says in place of a curve."""
    return dict(tab.value(DRAWN))


def box(tab: Tab, chart: str) -> tuple[float, float, float, float]:
    """Where a chart's plotting area is, scrolled to: left, top, width, height."""
    script = (
        f"(() => {{ const it = {figure_of(chart)}.querySelector('.u-over');"
        "it.scrollIntoView({block: 'center'}); const b = it.getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    left, top, width, height = tab.value(script)
    return left, top, width, height


def legend(tab: Tab, chart: str) -> list[str]:
    """The texts of a chart's legend, a row each."""
    return tab.value(f"[...{figure_of(chart)}.querySelectorAll('.u-series')].map(row => row.textContent)")


def figure_of(chart: str) -> str:
    """A script's expression for the element of a chart."""
    return f"document.querySelector('figure[data-chart=\"{chart}\"]')"


def check_looks(browser: Browser, path: Path) -> dict[str, Any]:
    """Opens a page on a desk and on a phone, in light and dark; returns what its charts show."""
    for size, dark in ((DESK, False), (PHONE, True)):
        with browser.open(path, size, dark) as tab:
            charts = drawn(tab)
            assert tab.value(CONTRAST) == []
            widest = tab.value("[document.documentElement.scrollWidth, innerWidth]")
            assert widest[0] <= widest[1], widest
            tab.choose("theme", "light" if dark else "dark")
            assert tab.value(CONTRAST) == []
            assert tab.requests == []
    return charts
