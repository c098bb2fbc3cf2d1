"""Provides the exports of a run that trains: `gregale export` on its checkpoints, in another process."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from gregale.atomic_files import os_error_text, remove
from gregale.checkpoint.manifest import CheckpointConfig, ExportConfig, folder_name, step_of, superfluous
from gregale.checkpoint.multihost import first_message
from gregale.runs.run_directory import RunDirectory

EXPORTS = "exports"  # in the run's directory
COMMAND = (sys.executable, "-m", "gregale", "export")
SECONDS = 60.0  # between two exchanges of processes that wait for an export


class Exports:
    """Makes a Hugging Face folder of a checkpoint in the background, one at a time.

    A process of its own reads the checkpoint of all processes and computes on this host's CPU. So the devices take no
    part, and a failure leaves the run alone: it is reported.

    - `in_use`: steps whose checkpoints must not be deleted
    - `command`: the words before the run, the folder, `--step` and the step
    """

    def __init__(self, run: RunDirectory, report: Callable[[str], None], command: Sequence[str] = COMMAND):
        self._run, self._report, self._command = run, report, command
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._last: tuple[int, Future] | None = None
        self.in_use: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin(self, step: int, config: ExportConfig) -> None:
        """Begin the export of a checkpoint that has just been made, if it is due; for process 0."""
        if not config.is_due(step):
            return
        if self._last is not None and not self._last[1].done():
            last = self._last[0]
            self._report(f"The export of step {step} is left out, because that of step {last} is not complete yet.")
            return
        self.in_use.add(step)
        self._last = step, self._thread.submit(self._write, step, config.keep_last)

    def wait(self) -> None:
        """Wait in all processes until the last export is complete."""
        while first_message(None if self._is_done() else "not complete"):
            pass

    def _is_done(self) -> bool:
        try:
            if self._last is not None:
                self._last[1].result(SECONDS)
        except TimeoutError:
            return False
        return True

    def _write(self, step: int, keep_last: int | None) -> None:
        """Write the folder in place of one that another course of this run has made; report the result."""
        folder = Path(str(self._run.path)).absolute() / EXPORTS
        target = folder / folder_name(step)
        try:
            remove(target)
            if failure := self._failure(step, target):
                self._report(f"The export of step {step} failed, and the run goes on: {failure}")
                return
            self._report(f"The export of step {step} is in {target}.")
            steps = sorted(found for name in os.listdir(folder) if (found := step_of(name)) is not None)
            rule = CheckpointConfig(keep_last=keep_last or len(steps))
            for old in superfluous(steps, step, rule):
                remove(folder / folder_name(old))
        except OSError as error:
            self._report(f"The export of step {step} failed, and the run goes on: {os_error_text(error)}.")
        finally:
            self.in_use.discard(step)

    def _failure(self, step: int, target: Path) -> str:
        """Run the command; return the last line of its messages if it fails, else nothing."""
        done = subprocess.run(
            [*self._command, str(target.parent.parent), str(target), "--step", str(step)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the run, which waits for this process
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            check=False,
        )
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}."]
        return lines[-1] if done.returncode else ""
