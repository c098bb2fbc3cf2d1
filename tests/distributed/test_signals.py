"""A signal asks for a stop; a second SIGINT insists."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gregale.distributed.signals import SIGNALS, Cut, StopRequest, process_goes_on, stop_on_signals
from gregale.errors import Interrupted


@pytest.fixture(autouse=True)
def hang_ups_are_heard():
    """Tests may run under nohup, which has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_only_asks_and_a_second_sigterm_is_patient(number):
    with StopRequest() as stop:
        assert not stop.agreed(1)
        os.kill(os.getpid(), number)
        assert stop.agreed(2)
        assert stop.signal_name == signal.Signals(number).name
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(3)


@pytest.fixture
def timer(monkeypatch) -> Mock:
    """In place of the one that would end this process."""
    monkeypatch.setattr("gregale.distributed.signals.Timer", timer := Mock())
    return timer


@pytest.mark.parametrize(("first", "goes_on"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)])
def test_a_second_interrupt_is_raised_and_ends_a_process_that_does_not_go_on(timer, first, goes_on):
    with process_goes_on() if goes_on else nullcontext(), StopRequest() as stop:
        os.kill(os.getpid(), first)
        assert not timer.called
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed(1)
    assert timer.called == timer.return_value.start.called != goes_on
    assert StopRequest.ends_process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_where_nothing_is_to_be_saved_the_first_signal_ends_the_command(timer, number):
    said = []
    with stop_on_signals(SIGNALS) as stop:
        stop.report = said.append
        with pytest.raises(Interrupted) as raised:
            os.kill(os.getpid(), number)
    assert raised.value.args == (128 + number,)
    assert said == [f"{number.name}: there is nothing to save, and the command ends."]
    assert timer.return_value.start.called


def test_what_is_between_batches_is_left_after_a_signal_and_not_for_a_reason():
    said = []
    with StopRequest() as stop:
        stop.report = said.append
        stop.ask("the loss falls no more")
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Cut):
            stop.check()
        assert stop.is_cut
    assert said == ["SIGTERM: the run ends after its present step or batch, and saves its state."]


PROGRAM = """
import hashlib, sys
from gregale.distributed.signals import StopRequest
from gregale.errors import Interrupted

with StopRequest(exit_seconds=0.1) as stop:
    stop.unsaved = lambda: sys.argv[1] == "unsaved"
    try:
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)  # minutes without an instruction, as a compiler
    except Interrupted as error:  # the signal has come before
        sys.exit(*error.args)
"""
INSISTED = "gregale: interrupted; the unfinished checkpoint is not valid, earlier checkpoints are unchanged\n"
ENDS = {
    "unsaved": (130, "SIGTERM: the run ends after its present step or batch, and saves its state.\n" + INSISTED),
    "saved": (143, "SIGTERM: there is nothing to save, and the command ends.\n"),
}


def test_a_signal_is_told_and_a_process_ends_whatever_its_main_thread_does():
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PROGRAM]
    processes = {state: subprocess.Popen([*command, state], **streams) for state in ENDS}
    for state, process in processes.items():
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        said = process.stderr.readline()
        if state == "unsaved":
            process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=120)
        assert (process.returncode, said + rest) == (ENDS[state][0], f"gregale: {ENDS[state][1]}")


def test_another_thread_catches_nothing_and_the_old_handlers_come_back():
    def handlers() -> list:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    def handlers_inside() -> list:
        with StopRequest() as stop:
            assert not stop.agreed(1)
            return handlers()

    before = handlers()
    with ThreadPoolExecutor() as pool:
        assert pool.submit(handlers_inside).result() == before
    with pytest.raises(ZeroDivisionError), StopRequest():
        _ = 1 / 0
    assert handlers() == before


def test_a_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed(1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_exchange_among_processes_does_not_overtake_a_step(monkeypatch):
    """Keep two programs apart whose collectives would meet in one connection: Gloo aborts the process then."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    go_on = Event()

    def wait(number: np.ndarray) -> np.ndarray:
        go_on.wait(60)
        return number

    def on_device(number: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.pure_callback(wait, jax.ShapeDtypeStruct((1,), jnp.float32), number), "device")

    mesh, split = Mesh(np.asarray(jax.devices()), ("device",)), PartitionSpec("device")
    numbers = jax.device_put(np.ones(mesh.size, np.float32), NamedSharding(mesh, split))
    step = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False))
    with StopRequest(check_every=1) as stop, ThreadPoolExecutor(1) as thread:
        sums = step(numbers)
        try:
            assert not stop.agreed(1), "it begins an exchange and does not wait for the step"
            answer = thread.submit(stop.agreed, 2)
            with pytest.raises(TimeoutError):
                answer.result(1)
        finally:
            go_on.set()
        assert not answer.result(60)
    assert float(sums[0]) == mesh.size


FORKS = """
import os, signal, threading, time
from gregale.distributed.signals import StopRequest

def fork(end):
    child = os.fork()
    if not child:
        signal.alarm(20)
        end()
        os._exit(0)
    return child

def left_the_block():
    stop.__exit__()
    os._exit(int(signal.set_wakeup_fd(-1) != -1))

with StopRequest(exit_seconds=0.5) as stop:
    stop.report, stop.unsaved = print, lambda: False
    for child in (fork(signal.pause) for _ in range(20)):
        os.kill(child, signal.SIGTERM)  # most have just begun
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert os.waitstatus_to_exitcode(os.waitpid(fork(left_the_block), 0)[1]) == 0
    living = fork(signal.pause)
assert "signals" not in [thread.name for thread in threading.enumerate()], "the child does not hold the pipe"
time.sleep(1)
os.kill(living, signal.SIGKILL)
print("goes on")
"""


def test_a_forked_child_has_its_own_signals_and_the_pipe_is_its_parents():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
