"""A signal asks for a stop; a second SIGINT insists."""

import os
import signal
import subprocess
import sys

import pytest

from gregale.distributed.signals import StopRequest


@pytest.fixture(autouse=True)
def hang_ups_are_heard():
    """Tests may run under nohup, which has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_only_asks(number):
    with StopRequest() as stop:
        assert not stop.agreed(1)
        os.kill(os.getpid(), number)
        assert stop.agreed(2)
        assert stop.signal_name == signal.Signals(number).name


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_interrupt_is_raised(first):
    with StopRequest() as stop:
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed(1)


def test_who_interrupts_twice_does_not_wait_for_what_does_not_answer():
    """A store that is away, say, to which a checkpoint is on its way in a thread that Python would wait for."""
    program = """
import os, signal, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from gregale.distributed.signals import StopRequest, end_soon

with StopRequest(insist=partial(end_soon, 0.1)), ThreadPoolExecutor() as saving:
    saving.submit(time.sleep, 600)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130
    assert done.stderr == (
        "gregale: interrupted; the unfinished checkpoint is not valid, earlier checkpoints are unchanged\n"
    )


def test_a_second_sigterm_is_patient():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(1)


def test_the_old_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(ZeroDivisionError), StopRequest():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed(1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
