"""One HTML document without outside parts: its markup, style and charts."""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from gregale.errors import UserError

COLOURS = 10
SMOOTHINGS = (  # shares of the x axis, in percent
    ("losses", "losses, 2 %"),
    ("0", "none"),
    ("0.5", "all, 0.5 %"),
    ("2", "all, 2 %"),
    ("10", "all, 10 %"),
)
DIGITS = 6


def colour_of(index: int) -> int:
    """Return the number of a colour; the colours repeat after the last one."""
    return index % COLOURS


@dataclass(frozen=True, eq=False)
class Series:
    """A line.

    - `x`, `y`: [point]; x ascends; NaN where there is no number
    - `means`: x and y of the same line in fewer points, each a mean, as input of smoothing; None: use all points
    - `run`: index of the run on the page whose steps are in `x`; None: `x` has the values of the axis
    - `smooth`: whether the page smooths the line unless its reader chooses otherwise
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    means: tuple[np.ndarray, np.ndarray] | None = None
    run: int | None = None
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    stairs: bool = False
    smooth: bool = False

    def to_json(self) -> dict[str, Any]:
        flags = {name: 1 for name in ("dashed", "dots", "stairs", "smooth") if getattr(self, name)}
        means = {} if self.means is None else {"means": _points(*self.means)}
        run = {} if self.run is None else {"run": self.run}
        return {"label": self.label, "colour": self.colour, **run, **flags, **_points(self.x, self.y), **means}


@dataclass(frozen=True)
class Lines:
    """Lines over an axis."""

    key: str
    title: str
    series: Sequence[Series]
    unit: str = ""  # unit of y: "", "bytes", "seconds", "share" (shown in percent)
    axis: tuple[str, str] | None = None  # name and unit of x; None: the axis of the page, which the reader chooses
    help: str = ""
    clipped: bool = False  # y ends below values that are far above the others, and the page reports these

    def to_json(self) -> dict[str, Any]:
        axis = {} if self.axis is None else {"axis": {"label": self.axis[0], "unit": self.axis[1]}}
        series = [each.to_json() for each in self.series]
        return {"kind": "lines", "unit": self.unit, "clipped": self.clipped, **axis, "series": series}


@dataclass(frozen=True)
class Span:
    begin: float
    end: float
    kind: int
    text: str


@dataclass(frozen=True)
class Row:
    label: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class Spans:
    """Rows of spans over an axis."""

    key: str
    title: str
    rows: Sequence[Row]
    kinds: Sequence[str]  # names of the kinds; later kinds are drawn over earlier ones
    axis: tuple[str, str] = ("Seconds", "seconds")
    help: str = ""
    thin: Sequence[int] = ()  # numbers of the kinds that are thinner than a row

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"label": row.label, "spans": [[_x(each.begin), _x(each.end), each.kind, each.text] for each in row.spans]}
            for row in self.rows
        ]
        return {
            "kind": "spans",
            "axis": {"label": self.axis[0], "unit": self.axis[1]},
            "kinds": list(self.kinds),
            "thin": list(self.thin),
            "rows": rows,
        }


Chart = Lines | Spans


def _points(x: np.ndarray, y: np.ndarray) -> dict[str, list]:
    """Encode integer x as differences, which are shorter, and y with six digits."""
    y_json = [_number(value) for value in y.tolist()]
    if x.dtype.kind in "iu":
        return {"dx": np.diff(x, prepend=0).tolist(), "y": y_json}
    return {"x": [_x(value) for value in x.tolist()], "y": y_json}


def _number(value: float) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) else short


def _x(value: float) -> float | int:
    short = round(float(value), 6)
    return int(short) if short == int(short) else short


class Html(str):
    """Markup that is not escaped inside an element."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return `<tag attributes>children</tag>`; `class_` is `class`, `_` in other names is `-`, None is omitted."""
    named = (
        (name.removesuffix("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None
    )
    inside = "".join(f' {name}="{html.escape(_printable(value))}"' for name, value in named)
    return Html(f"<{tag}{inside}>{joined(children)}</{tag}>")


def joined(children: Iterable[object]) -> Html:
    """Concatenate the children; skip None."""
    return Html(
        "".join(
            child if isinstance(child, Html) else html.escape(_printable(child))
            for child in children
            if child is not None
        )
    )


def section(title: str, *children: object) -> Html | None:
    """Return a part of the page with a heading; None if there are no children but None."""
    known = [child for child in children if child is not None]
    return element("section", element("h2", title), *known) if known else None


def folded(title: object, *children: object, opened: bool = False) -> Html:
    """Return a part that a click on its title shows; it is always printed."""
    opening = Html(" open") if opened else ""
    return Html(f"<details{opening}>{element('summary', title)}{joined(children)}</details>")


def table(
    headings: Sequence[object], rows: Sequence[Sequence[object]], kinds: str | None = None, label: str | None = None
) -> Html:
    """Return a table, which scrolls by itself if it is too wide for the page.

    - `kinds`: `numbers` if all columns except the first are numbers; `runs` if the rows are runs, to sort and filter
    """
    head = element("tr", *(element("th", heading, scope="col") for heading in headings))
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    inside = element("table", element("thead", head), element("tbody", *body), class_=kinds)
    return element("div", inside, class_="wide", tabindex=0, role="region", aria_label=label or "table")


def cards(entries: Iterable[tuple[str, object]]) -> Html:
    """Return a list of prominent values, each with its name."""
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in entries), class_="cards"
    )


def notice(*texts: str) -> Html | None:
    """Return a list of notices; None if there are no texts."""
    return element("ul", *(element("li", text) for text in texts), class_="notice", role="status") if texts else None


def swatch(colour: int) -> Html:
    """Return a dot in the colour of a chart's line."""
    return Html(f'<span class="swatch c{colour}" aria-hidden="true"></span>')


def _printable(value: object) -> str:
    """Replace control characters and surrogates, which are invalid in UTF-8 files and browsers."""
    return "".join(
        each if each in "\n\t" or (each.isprintable() or each == "\u00a0") else "\N{REPLACEMENT CHARACTER}"
        for each in str(value)
    )


# Two files of the package `youplot`, whose code does not run: dist/uPlot.iife.min.js and dist/uPlot.min.css of this
# release of uPlot, with their SHA-256.
PACKAGE = "youplot"
RELEASE = "1.6.31"
FILES = {
    "youplot/vendor/uplot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
    "youplot/vendor/uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@dataclass(frozen=True)
class Axis:
    """An axis that the reader can choose for the lines of runs; `unit` as in `Lines`."""

    key: str
    label: str
    unit: str = ""


@dataclass(frozen=True, eq=False)
class Run:
    """A run whose lines are drawn over the page's axes.

    - `axes`: by `Axis.key`, steps and their values on that axis
    - `stages`: steps after which a stage began, with its number
    """

    label: str
    axes: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    stages: Sequence[tuple[int, int]] = ()

    def to_json(self) -> dict[str, Any]:
        stages = {"stages": self.stages} if self.stages else {}
        return {"label": self.label, "axes": {key: _points(*axis) for key, axis in self.axes.items()}, **stages}


class Page:
    """A page to which parts are added.

    - `runs`, `axes`: for lines without an axis of their own; the page shows the first axis first
    - `live_seconds`: interval at which a served page reloads itself; None: never
    """

    def __init__(
        self,
        title: str,
        about: str = "",
        runs: Sequence[Run] = (),
        axes: Sequence[Axis] = (),
        live_seconds: float | None = None,
    ):
        self._title, self._about, self._runs, self._axes = title, about, tuple(runs), tuple(axes)
        self._live_seconds = live_seconds
        self._parts: list[Html] = []
        self._charts: dict[str, Any] = {}

    def add(self, *parts: Html | None) -> None:
        self._parts += [part for part in parts if part is not None]

    def chart(self, chart: Chart) -> Html:
        """Add a chart's data to the page; return the element in which the chart is drawn."""
        assert chart.key not in self._charts, chart.key
        self._charts[chart.key] = chart.to_json()
        help = element("p", chart.help, class_="help") if chart.help else None
        legend = _legend(chart) if isinstance(chart, Spans) else None
        return element(
            "figure",
            element("figcaption", element("h3", chart.title), help),
            element("div", class_="plot", role="img", aria_label=chart.title),
            legend,
            class_=f"chart {type(chart).__name__.lower()}",
            data_chart=chart.key,
        )

    def charts(self, *charts: Chart) -> Html:
        return element("div", *(self.chart(each) for each in charts), class_="charts")

    def html(self) -> str:
        scripts = [uplot()[0], _own("page.js")]
        head = joined(
            [
                Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
                Html(f'<meta http-equiv="Content-Security-Policy" content="{self._policy(scripts)}">'),
                Html('<meta name="generator" content="gregale"><meta name="color-scheme" content="light dark">'),
                element("title", self._title),
                element("style", Html(uplot()[1]), Html(_own("page.css"))),
            ]
        )
        heading = element("header", element("h1", self._title), element("p", self._about), self._controls())
        data = {
            "axes": [{"key": each.key, "label": each.label, "unit": each.unit} for each in self._axes],
            "runs": [run.to_json() for run in self._runs],
            "charts": self._charts,
            "live": self._live_seconds,
        }
        body = joined(
            [
                heading,
                element("main", *self._parts),
                element("script", Html(_inert(data)), type="application/json", id="data"),
                *(element("script", Html(script)) for script in scripts),
            ]
        )
        return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'

    def _policy(self, scripts: Sequence[str]) -> str:
        """Return a policy that runs only these scripts and loads nothing; a served page may reload itself."""
        digests = " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
        )
        rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
        itself = "" if self._live_seconds is None else " connect-src 'self';"
        return f"default-src 'none'; script-src {digests};{itself} {rest}"

    def _controls(self) -> Html:
        """Return the controls: axis, scales and smoothing for lines, a filter of runs, and the colours of the page."""
        controls = []
        if self._axes:
            controls.append(_select("x", "Over", [(each.key, each.label) for each in self._axes]))
        if any(each["kind"] == "lines" for each in self._charts.values()):
            controls += [_checkbox("logx", "log x"), _checkbox("logy", "log y")]
        if len(self._runs) > 1:
            controls.append(element("label", "Runs", Html('<input type="search" id="filter" placeholder="names">')))
        if self._runs:
            controls.append(_select("smooth", "Smoothing", SMOOTHINGS))
        controls.append(_select("theme", "Colours", [("auto", "as the system"), ("light", "light"), ("dark", "dark")]))
        return element("form", *controls, element("button", "Whole range", type="button", id="reset"), id="controls")


def _select(key: str, label: str, options: Sequence[tuple[str, str]]) -> Html:
    return element(
        "label", label, element("select", *(element("option", name, value=each) for each, name in options), id=key)
    )


def _checkbox(key: str, label: str) -> Html:
    return element("label", Html(f'<input type="checkbox" id="{key}">'), label)


def _legend(chart: Spans) -> Html:
    kinds = (
        element("span", Html(f'<span class="swatch c{index}" aria-hidden="true"></span>'), kind)
        for index, kind in enumerate(chart.kinds)
    )
    return element("div", *kinds, element("output", ""), class_="kinds")


def _inert(data: Any) -> str:
    """Return JSON in which no text can end a script element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _own(name: str) -> str:
    return resources.files("gregale.web").joinpath(name).read_text(encoding="utf-8")


@cache
def uplot() -> tuple[str, str]:
    """Return script and style of uPlot; raise `UserError` if they are absent or differ from the release."""
    script, style = (_checked(name, digest) for name, digest in FILES.items())
    return script, style


def _checked(name: str, digest: str) -> str:
    try:
        content = Path(str(distribution(PACKAGE).locate_file(name))).read_bytes()
    except (PackageNotFoundError, FileNotFoundError):
        raise UserError(
            f"a page needs the package {PACKAGE}, which brings uPlot {RELEASE} for its charts; it is not installed. "
            f"`make setup` installs it, or `pip install {PACKAGE}==1.0.0`."
        ) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(
            f"{name} of the package {PACKAGE} is not that of uPlot {RELEASE}, and no page is made with another one. "
            f"`pip install --force-reinstall {PACKAGE}==1.0.0` brings it back."
        )
    return content.decode()
