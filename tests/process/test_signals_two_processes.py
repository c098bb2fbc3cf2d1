"""A signal that reaches one process stops both at the same step."""

STOP = """
import os
import signal

from gregale.distributed.signals import StopRequest

stopped_at = None
with StopRequest(check_every=3) as stop:
    for step in range(1, 40):
        if rank == 1 and step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.agreed(step):
            stopped_at = step
            break
print(stopped_at, stop.signal_name)
"""


def test_both_stop_at_one_step_though_one_got_the_signal(run_two_processes):
    outputs = run_two_processes(STOP)
    assert [output.splitlines()[-1] for output in outputs] == ["12 None", "12 SIGTERM"]
