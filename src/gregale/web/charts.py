"""The data of a page's charts: lines over an axis, and spans of time in rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLOURS = 10
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

    def to_json(self) -> dict[str, Any]:
        flags = {name: 1 for name in ("dashed", "dots", "stairs") if getattr(self, name)}
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

    def to_json(self) -> dict[str, Any]:
        axis = {} if self.axis is None else {"axis": {"label": self.axis[0], "unit": self.axis[1]}}
        return {"kind": "lines", "unit": self.unit, **axis, "series": [each.to_json() for each in self.series]}


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
