"""Pictures of the model: utilisation against bandwidth, and the timeline of a few steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gregale.errors import UserError, install_hint
from gregale.files import replacing
from gregale.settings import shortened
from gregale.timeline.simulate import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
INK = "#808080"  # of text and axes in SVG: about as far from a white page as from a dark one
# Blue, orange, green, red, purple, brown, grey: told apart by people with the usual colour blindness.
LINE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#8c6d31", "#555555")
KIND_COLOURS = {"forward": "#56b4e9", "backward": "#009e73", "transfer": "#cc79a7"}


def check_picture_path(path: Path, key: str) -> None:
    """See that a picture can be written under this name.

    Raises:
        UserError: the suffix is neither .svg nor .png, or the folder does not exist.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{key}: {shortened(str(path))} has the suffix {shortened(path.suffix)!r}; a picture is .svg or .png."
        )
    if not path.parent.is_dir():
        raise UserError(f"{key}: the folder {shortened(str(path.parent))} does not exist; create it or choose another.")


def plot_utilisation(path: Path, gbit_per_second: np.ndarray, curves: Mapping[str, np.ndarray], title: str) -> None:
    """Draw utilisation against bandwidth, a line for each method.

    Args:
        path: the picture, .svg or .png.
        gbit_per_second: [bandwidth], drawn on a logarithmic axis.
        curves: by label, the utilisation [bandwidth].
        title: heading.

    Raises:
        UserError: matplotlib is not installed, or the suffix is another.
    """
    figure = new_figure(path, (7.5, 4.5))
    axes = _draw_shares(figure, gbit_per_second, curves, title)
    axes.set_xlabel("bandwidth between sites, Gbit/s")
    axes.set_ylabel("compute utilisation")
    save_figure(figure, path)


def _draw_shares(
    figure: "Figure",
    x: np.ndarray | Sequence[float],
    curves: Mapping[str, np.ndarray] | Mapping[str, Sequence[float]],
    title: str,
    marker: str = "",
) -> "Axes":
    """Lines from 0 to 1 over a logarithmic axis, and what they are below."""
    axes = figure.subplots()
    for (label, shares), colour in zip(curves.items(), LINE_COLOURS, strict=False):
        axes.plot(x, shares, label=label, color=colour, linewidth=1.8, marker=marker, markersize=5)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.03)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return axes


def plot_timeline(path: Path, intervals: Mapping[str, Sequence[Interval]], steps: int, title: str) -> None:
    """Draw compute (above) and transfers (below) of a few steps, a panel for each method.

    Each panel starts one step before the method's first transfer, so that something can be seen of the methods that
    communicate seldom; its seconds count from there. The time axis ends at twice the compute of those steps.

    Args:
        path: the picture, .svg or .png.
        intervals: by label, the intervals of one simulated run.
        steps: how many steps each panel shows.
        title: heading.

    Raises:
        UserError: matplotlib is not installed, or the suffix is another.
    """
    figure = new_figure(path, (9.0, 1.2 + 1.1 * len(intervals)))
    panels = figure.subplots(len(intervals), 1, sharex=True, squeeze=False)[:, 0]
    longest = 0.0
    for axes, (label, found) in zip(panels, intervals.items(), strict=True):
        shown = window(found, steps)
        _draw_panel(axes, shown)
        longest = max(longest, *(work.end for work in shown))
        axes.set_title(label, loc="left", fontsize="small")
    compute = sum(work.end - work.start for work in shown if work.kind != "transfer")
    panels[-1].set_xlim(0, min(longest, 2 * compute) if compute else longest)  # site 0 may have left before
    panels[-1].set_xlabel("seconds")
    figure.suptitle(title, x=0.02, ha="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper right", ncols=3, fontsize="small", frameon=False)
    save_figure(figure, path)


def window(intervals: Sequence[Interval], steps: int) -> list[Interval]:
    """The intervals of the steps around the first transfer, with seconds counted from the first of them."""
    first = max(1, min((work.step for work in intervals if work.kind == "transfer"), default=1) - 1)
    shown = [work for work in intervals if first <= work.step < first + steps]
    origin = min(work.start for work in shown)
    return [replace(work, start=work.start - origin, end=work.end - origin) for work in shown]


def _draw_panel(axes: "Axes", shown: Sequence[Interval]) -> None:
    for kind, colour in KIND_COLOURS.items():
        bars = [(work.start, work.end - work.start) for work in shown if work.kind == kind]
        row = (0, 0.9) if kind == "transfer" else (1, 0.9)
        edge = 0.5 if kind == "transfer" else 0.0  # an edge would hide short stretches of compute
        axes.broken_barh(bars, row, facecolors=colour, edgecolors="white", linewidth=edge, label=kind)
    axes.set_yticks([0.45, 1.45], ["link", "compute"])
    axes.set_ylim(-0.1, 2.0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def new_figure(path: Path, size_inches: tuple[float, float]) -> "Figure":
    check_picture_path(path, "picture")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"picture: {path} needs matplotlib, which is not installed. {install_hint('plot')}") from error
    return Figure(figsize=size_inches, layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the picture whole or not at all, the same bytes for the same content; see `on_any_page` for SVG."""
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with replacing(path) as partial, matplotlib.rc_context({"svg.hashsalt": "gregale"}):
        figure.savefig(partial, format=path.suffix[1:], metadata=metadata, dpi=150)
        if path.suffix == ".svg":
            partial.write_text(on_any_page(partial.read_text(encoding="utf-8")), encoding="utf-8")


def on_any_page(svg: str) -> str:
    """An SVG of matplotlib's without its white background, and in grey where it is black: for light and dark pages."""
    svg = svg.replace('style="fill: #ffffff"', 'style="fill: none"').replace("stroke: #000000", f"stroke: {INK}")
    text = f"svg{{fill: {INK}}} "  # which has no colour of its own
    return svg if text in svg else svg.replace("*{stroke-linejoin", f"{text}*{{stroke-linejoin", 1)
