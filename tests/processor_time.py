"""Processor time and compilations of each test, by folder; `make test` fails if the whole suite takes too much."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
MOST_COMPILATIONS = 140  # of a test and of fixtures that it is the first to use
WHY = f"more than {MOST_COMPILATIONS}. Eager operations compile one each: expect values of NumPy, or use jit."
OPTION = "--most-processor-minutes"
YARDSTICK = 0.008  # seconds of `yardstick` on the processor whose minutes are counted
TOTALS = ("seconds", "compilations")


class ProcessorTime:
    """A pytest plugin: each report has what its phase took; the end of a session shows the sums.

    Processors differ, also from hour to hour on a shared machine. So each file ends with a `yardstick`, and the minutes
    are those of a processor on which it takes `YARDSTICK`.
    """

    def __init__(self, tests: Path, most_minutes: float | None):
        self._tests, self._most_minutes = tests, most_minutes
        self._spent, self._file = processor_seconds(), Path()
        self._compiled, self._of_test = 0, 0
        self._by_folder, self._yardsticks = {name: Counter[str]() for name in TOTALS}, list[float]()
        import jax.monitoring  # `conftest` has set its flags by now

        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: object, **__: object) -> None:
        self._compiled += event == COMPILED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        before, self._spent = self._spent, processor_seconds()
        report.took = {"seconds": self._spent - before, "compilations": self._compiled, "yardstick": None}
        self._of_test = self._compiled + (0 if call.when == "setup" else self._of_test)
        self._compiled = 0
        if call.when == "call" and report.passed and self._of_test > MOST_COMPILATIONS:
            report.outcome, report.longrepr = "failed", f"{self._of_test} compilations, {WHY}"
        if item.path != self._file:
            self._file, report.took["yardstick"] = item.path, yardstick()
            self._spent = processor_seconds()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = report.took  # type: ignore[attr-defined]
        path = (self._tests.parent / report.fspath).relative_to(self._tests)
        for name in TOTALS:
            self._by_folder[name][path.parts[0]] += took[name]
        self._yardsticks += [took["yardstick"]] if took["yardstick"] else []

    @property
    def minutes(self) -> Counter[str]:
        scale = YARDSTICK / statistics.median(self._yardsticks or [YARDSTICK]) / 60
        return Counter({folder: seconds * scale for folder, seconds in self._by_folder["seconds"].items()})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_controller = not hasattr(session.config, "workerinput")
        if is_controller and self._most_minutes and self.minutes.total() > self._most_minutes:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._most_minutes:
            return
        write, compilations = terminalreporter.write_line, self._by_folder["compilations"]
        yardsticks = statistics.median(self._yardsticks or [YARDSTICK])
        terminalreporter.section("processor minutes and compilations")
        for folder, minutes in self.minutes.most_common():
            write(f"{minutes:8.2f} {compilations[folder]:6}  {folder}")
        total = self.minutes.total()
        verdict = "more than" if total > self._most_minutes else "of at most"
        write(f"{total:8.2f} {compilations.total():6}  in all, {verdict} {self._most_minutes:g} minutes")
        write(f"of a processor that takes {1e3 * YARDSTICK:g} ms for the yardstick; here {1e3 * yardsticks:.1f} ms")


def processor_seconds() -> float:
    """Return those of this process and of its children that ended."""
    return sum(os.times()[:4])


def yardstick() -> float:
    """Return the processor seconds of some work of Python: the least of three."""

    def once() -> float:
        begin = time.process_time()
        sum(len(str(number)) for number in range(100_000))
        return time.process_time() - begin

    return min(once() for _ in range(3))
