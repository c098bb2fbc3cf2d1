"""Trackers, which send a run's metrics to other programs, by `type`."""

import importlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus

from gregale.errors import KeyedError, UserError, install_hint, told
from gregale.settings import Settings, setting
from gregale.storage import StoragePath
from gregale.storage.jsonl import ResumePoint, lines_at
from gregale.tracking.callback import Callback, Callbacks, Metrics, RunInfo, finite
from gregale.tracking.console import Console


class Tracker(Callback, ABC):
    """A callback that logs the metrics of steps and evaluations in the same way."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; further calls for a step may add other metrics."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.log(step, metrics)

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self.log(step, metrics)


class JsonlTracker(Tracker):
    """Writes one JSON object per call, with null for NaN and infinities, to a line of a file or an object.

    Lines of steps after `resumed_from` and damaged lines are removed. `report` is called with one line when the file
    cannot be written, and when it can be written again.
    """

    def __init__(self, path: StoragePath, resumed_from: int = 0, report: Callable[[str], None] = print):
        self._lines = lines_at(path, ResumePoint("step", resumed_from), report)

    def log(self, step: int, metrics: Metrics) -> None:
        """Write `{"step": step, **metrics}`, with numbers of NumPy and JAX as Python's."""
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in finite(metrics).items()}
        self._lines.add({"step": step} | dict.fromkeys(metrics) | numbers)

    def flush(self) -> None:
        """Write buffered lines; raise `StoreError` if a store cannot be written."""
        self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines; raise `UserError` if they cannot be written."""
        self._lines.close()


class Guarded(Callback):
    """A wrapper of a third-party tracker whose errors (a full disk, no network) never end the run."""

    def __init__(self, tracker: Callback, name: str, report: Callable[[str], None]):
        self._tracker, self._name, self._report = tracker, name, report
        self._has_failed = False

    def on_start(self, run: RunInfo) -> None:
        self._try(lambda: self._tracker.on_start(run))

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._tracker.on_step(step, metrics))

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        self._try(lambda: self._tracker.on_evaluation(step, metrics))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._has_failed:
                self._report(f"The tracker {self._name} fails; the run continues without it: {told(error)}")
            self._has_failed = True


_WANDB_MODES = ("auto", "online", "offline")


@dataclass(frozen=True)
class TrackerConfig(Settings, draccus.ChoiceRegistry):
    """A tracker beside the console and `metrics.jsonl`.

    - `package`: the package that it needs; the extra with the name of the choice installs it
    """

    package: ClassVar[str]

    def open(self, run: RunInfo) -> Callback:
        """Start the tracker for a run."""
        raise AssertionError("only the choices are opened")


class _TensorBoardTracker(Tracker):
    def __init__(self, run: RunInfo):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run.files / "tensorboard"), purge_step=run.resumed_from + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in finite(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@TrackerConfig.register_subclass("tensorboard")
@dataclass(frozen=True)
class TensorBoardConfig(TrackerConfig):
    """Event files in the run directory's `tensorboard/`."""

    package: ClassVar[str] = "tensorboardX"

    def open(self, run: RunInfo) -> Callback:
        return _TensorBoardTracker(run)


class _SessionTracker(Tracker):
    """A tracker for the common interface of W&B and trackio: `log` takes a dictionary and a step."""

    def __init__(self, session: Any):
        self._session = session

    def log(self, step: int, metrics: Metrics) -> None:
        self._session.log(finite(metrics), step=step)

    def close(self) -> None:
        self._session.finish()


@TrackerConfig.register_subclass("wandb")
@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases. A resumed run is a second session in the group that has the run's name."""

    package: ClassVar[str] = "wandb"

    project: str = setting("gregale", "the project that the run is filed under")
    entity: str | None = setting(None, "the user or team, null for the login's own")
    mode: str = setting(
        "auto",
        "online, offline (files in the run directory), or auto: online with a login, else offline",
        choices=_WANDB_MODES,
    )

    def open(self, run: RunInfo) -> Callback:
        wandb = importlib.import_module(self.package)
        session = wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.name,
            group=run.name,
            dir=str(run.files),
            config=dict(run.config),
            mode=self._possible_mode(wandb),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return _SessionTracker(session)

    def _possible_mode(self, wandb: Any) -> str:
        """Return the mode; offline if there is no login, because W&B would stop and ask for one."""
        wanted = os.environ.get("WANDB_MODE", "online") if self.mode == "auto" else self.mode
        if wanted == "online" and not wandb.login(prompt=False, verify=False):
            return "offline"
        return wanted


@TrackerConfig.register_subclass("trackio")
@dataclass(frozen=True)
class TrackioConfig(TrackerConfig):
    """trackio, into its local database; `trackio show` displays it."""

    package: ClassVar[str] = "trackio"

    project: str = setting("gregale", "the project that the run is filed under")

    def open(self, run: RunInfo) -> Callback:
        trackio = importlib.import_module(self.package)
        trackio.init(project=self.project, name=run.name, config=dict(run.config), resume="allow")
        return _SessionTracker(trackio)


def check_each_once(configs: Sequence[TrackerConfig]) -> None:
    """Raise `KeyedError` if a tracker is named twice: both would write to the same files."""
    first: dict[str, int] = {}
    for number, config in enumerate(configs):
        name = TrackerConfig.get_choice_name(type(config))
        if name in first:
            raise KeyedError(
                f"trackers.{number}.type",
                f"is {name}",
                f", and so is trackers.{first[name]}.type; leave one of them out.",
            )
        first[name] = number


def check_installed(configs: Sequence[TrackerConfig]) -> None:
    """Raise `UserError` with the extra that installs it if the package of a chosen tracker is missing."""
    for config in configs:
        if importlib.util.find_spec(config.package) is None:
            name = TrackerConfig.get_choice_name(type(config))
            raise UserError(
                f"trackers: {name} needs the package {config.package}, which is not installed. "
                f"{install_hint(name)} Or leave {name} out of trackers."
            )


def open_trackers(
    configs: Sequence[TrackerConfig], own: Sequence[Callback], run: RunInfo, console: Console
) -> Callbacks:
    """Open `metrics.jsonl` of the run, whose directory exists, and the chosen trackers, and start the callbacks.

    The caller closes the console. A process that writes no files has only its own callbacks. Raises `UserError` as
    `check_installed`.

    - `own`: callbacks of the configuration
    """
    if not run.is_writer:
        return _started(Callbacks(own), run)
    check_installed(configs)
    jsonl = JsonlTracker(run.directory / "metrics.jsonl", run.resumed_from, console.message)
    others = (_opened(config, run, console) for config in configs)
    return _started(Callbacks([console, jsonl, *filter(None, others), *own], jsonl.flush), run)


def _started(callbacks: Callbacks, run: RunInfo) -> Callbacks:
    """Start callbacks; close them if one of them fails."""
    with ExitStack() as stack:
        stack.enter_context(callbacks)
        callbacks.on_start(run)
        stack.pop_all()
    return callbacks


def _opened(config: TrackerConfig, run: RunInfo, console: Console) -> Callback | None:
    """Open a tracker whose errors never end the run; return None if it cannot be opened, for example offline."""
    name = TrackerConfig.get_choice_name(type(config))
    try:
        return Guarded(config.open(run), name, console.message)
    except Exception as error:
        console.message(f"The tracker {name} does not open; the run continues without it: {told(error)}")
        return None
