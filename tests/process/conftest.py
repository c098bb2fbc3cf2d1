"""Programs that run in two real processes."""

import pytest

from tests.process.two import run_two


@pytest.fixture(scope="session")
def run_two_processes():
    return run_two
