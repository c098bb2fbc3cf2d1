"""Pictures of matplotlib's, for light and dark pages."""

from pathlib import Path
from typing import TYPE_CHECKING

from gregale.errors import UserError, install_hint
from gregale.files import replacing
from gregale.settings import shortened

if TYPE_CHECKING:
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
