"""HTML pages in one file, with zoomable charts, light and dark colours, and no network access.

    page = Page("Runs", "two runs of yesterday")
    page.add(section("Loss", page.chart(Lines("loss", "Loss", [Series("a", steps, losses)]))))
    page.add(section("Settings", table(("key", "value"), [("name", "<b>")])))     # every text is escaped
    page.html()

uPlot, which is part of the page, draws the charts in the reader's browser.
"""

from gregale.web.charts import Lines, Row, Series, Span, Spans, colour_of
from gregale.web.document import Axis, Page, Run
from gregale.web.markup import Html, cards, element, folded, notice, section, swatch, table

__all__ = [
    "Axis",
    "Html",
    "Lines",
    "Page",
    "Row",
    "Run",
    "Series",
    "Span",
    "Spans",
    "cards",
    "colour_of",
    "element",
    "folded",
    "notice",
    "section",
    "swatch",
    "table",
]
