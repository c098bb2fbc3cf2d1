"""One browser for the tests of a module."""

import warnings

import pytest

from tests.programs.pages.browser import Browser, found

NONE_HERE = "There is no Chromium on this machine: nobody looks at the pages. `apt-get install chromium` brings one."


@pytest.fixture(scope="module")  # not longer: Playwright's event loop keeps others from this thread
def browser():
    program = found()
    if program is None:
        warnings.warn(NONE_HERE, stacklevel=1)
        pytest.skip(NONE_HERE)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as chromium:
        yield Browser(chromium)
