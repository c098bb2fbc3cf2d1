"""Traces of a few steps for xprof, TensorBoard and Perfetto (`gregale train --profile START:STOP`).

    Profile(Window.parse("20:22", steps), run.profiles, report)  # a callback of the loop

Each process traces its own devices. In the background it writes unique files to one folder:
`steps-20-22/plugins/profile/steps-20-22/HOST-process-N.{xplane.pb,trace.json.gz}`.
"""

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, ClassVar

import jax

from gregale.atomic_files import os_error_text
from gregale.errors import UserError
from gregale.settings import shown
from gregale.storage import StoragePath, upload
from gregale.tracking.callback import Callback, Metrics, StepContext

MAX_STEPS = 100  # a trace is held in memory until it is written, and viewers show some million events
ENDINGS = (".xplane.pb", ".trace.json.gz")
_WINDOW = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")
_HOST_EVENTS = 2  # the level at which XLA:CPU records single operations


@dataclass(frozen=True)
class Window:
    """The steps to trace, `first` and `last` included, counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, steps: int) -> "Window":
        """Parse START:STOP; `steps` is the number of steps of the run. Raises `UserError`."""
        found = _WINDOW.fullmatch(text)
        if found is None:
            raise UserError(
                f"profile is {shown(text)}; it has to be START:STOP, the first and the last step to trace, for example "
                f"20:22."
            )
        window = cls(int(found[1]), int(found[2]))
        if wrong := window._mistake(steps):
            raise UserError(f"profile is {text}, but {wrong}")
        return window

    def _mistake(self, steps: int) -> str | None:
        if self.first < 1:
            return "steps are counted from 1. Step 1 is compiled while it is traced; choose a later step."
        if self.last < self.first:
            return f"step {self.last} comes before step {self.first}. Give the first step first."
        if self.last > steps:
            return f"the run has {steps} steps (`steps`). Give steps that it makes."
        if (count := self.last - self.first + 1) > MAX_STEPS:
            return f"that is {count} steps: a trace is held in memory, so at most {MAX_STEPS} are traced."
        return None

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class Profile(Callback):
    """Traces the steps of a window; `close` waits until the trace is written."""

    seconds: ClassVar[str] = "profile_seconds"

    def __init__(self, window: Window | None, folder: StoragePath, report: Callable[[str], None]):
        """
        - `folder`: the folder of all traces of the run
        - `report`: called with one line about the path of the trace, or the error, which never ends the run
        """
        self._window, self._report = window, report
        self._folder = folder / f"steps-{window}"
        self._session: Any = None
        self._writer: Thread | None = None

    def waits_before(self, step: int) -> bool:
        """Return whether the trace begins before this step, which may be inside the window if the run resumes."""
        window = self._window
        return window is not None and self._session is None and window.first <= step <= window.last

    def waits_after(self, step: int) -> bool:
        """Return whether the trace ends after this step."""
        return self._window is not None and self._session is not None and step >= self._window.last

    def before_step(self, pause: StepContext) -> Metrics:
        """Begin the trace."""
        del pause
        # No function of jax.profiler ends a trace without writing it.
        from jax._src.lib import _profiler  # pyright: ignore[reportAttributeAccessIssue]

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow down the traced code
        options.host_tracer_level = _HOST_EVENTS
        options.raise_error_on_start_failure = True
        try:
            self._session = _profiler.ProfilerSession(options)
        except (RuntimeError, ValueError) as error:
            self._window = None
            self._report(f"Nothing is traced: the profiler does not start ({error}).")
        return {}

    def after_step(self, pause: StepContext) -> Metrics:
        """End the trace; write it in the background."""
        del pause
        self._end()
        return {}

    def _end(self) -> None:
        session, self._session = self._session, None
        data, self._window = session.stop(), None
        self._writer = Thread(target=self._write, args=(session, data), name="profile")
        self._writer.start()

    def close(self) -> None:
        if self._session is not None:  # the run was stopped before the last step of the window
            self._end()
        if self._writer is not None:
            self._writer.join()

    def _write(self, session, data: bytes) -> None:
        own = f"{socket.gethostname()}-process-{jax.process_index()}"
        finished = self._folder / "plugins" / "profile" / self._folder.name
        try:
            finished.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as unfinished:
                session.export(data, unfinished)
                for ending in ENDINGS:
                    for path in Path(unfinished).glob(f"plugins/profile/*/*{ending}"):
                        upload(path, finished / f"{own}{ending}")
        except (OSError, RuntimeError, UserError) as error:
            self._report(f"The profile could not be written to {self._folder}: {os_error_text(error)}.")
        else:
            self._report(f"The profile is in {self._folder}.")
