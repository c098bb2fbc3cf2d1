"""HTML pages in one file, with zoomable charts, light and dark colours, and no network access.

Every text is escaped. uPlot, which is part of the page, draws the charts in the reader's browser.
"""
