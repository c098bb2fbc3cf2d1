"""One browser for all tests of pages."""

import warnings

import pytest

from tests.programs.pages.browser import Browser, found

NONE_HERE = "There is no Chromium on this machine: nobody looks at the pages. `apt-get install chromium` brings one."


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = found()
    if program is None:
        warnings.warn(NONE_HERE, stacklevel=1)
        pytest.skip(NONE_HERE)
    opened = Browser(program, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
