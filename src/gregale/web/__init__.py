"""HTML pages in one file, with zoomable charts, light and dark colours, and no network access.

    page = Page("Runs", "two runs of yesterday")
    page.add(section("Loss", page.chart(Lines("loss", "Loss", [Series("a", steps, losses)]))))
    page.add(section("Settings", table(("key", "value"), [("name", "<b>")])))     # every text is escaped
    page.html()

uPlot, which is part of the page, draws the charts in the reader's browser.
"""
