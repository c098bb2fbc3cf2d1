"""HTML elements with automatic escaping: a child that is not `Html` is escaped."""

import html
from collections.abc import Iterable, Sequence


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
