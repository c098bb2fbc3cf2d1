"""Files of tasks: JSON lines, a question each, and common settings in the first line.

    {"kind": "multiple_choice", "prefix": "Q: 1 + 1 =\\nA: 2\\n\\n"}
    {"context": "Q: 2 + 3 =\\nA:", "choices": ["4", "5", "6"], "answer": 1}

A file without a line of settings has multiple-choice questions. Unknown keys are ignored in a question's line and
rejected in the line of settings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any

from gregale.data.sources.base import BYTE_ORDER_MARK, encodable, expand, files_matching, read_bytes
from gregale.data.sources.text import parsed
from gregale.errors import UserError
from gregale.evaluation.tasks.kinds import KINDS, Form, Question, Score, extracted
from gregale.evaluation.tasks.published import PUBLISHED, name_of
from gregale.settings import did_you_mean, shown

SETTINGS = tuple(each.name for each in fields(Form))


@dataclass(frozen=True)
class Task:
    """The questions of one file."""

    name: str  # the file's name without its ending
    kind: str  # a name of `KINDS`
    questions: tuple[Question, ...]  # one at least
    path: str  # of the file
    form: Form

    @property
    def generates(self) -> bool:
        """Return whether a model generates the answers."""
        return KINDS[self.kind].generates

    def metrics_of_answers(self, answers: Sequence[str]) -> dict[str, float]:
        """Return the metrics of generated answers by name."""
        return KINDS[self.kind].metrics(self.questions, [extracted(each, self.form.extract) for each in answers])

    def metrics(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the metrics of the questions' scores by name; all NaN if any log-likelihood is NaN."""
        metrics = KINDS[self.kind].metrics(self.questions, scores)
        sound = all(abs(score.log_likelihoods).max() < float("inf") for score in scores)
        return metrics if sound else dict.fromkeys(metrics, float("nan"))


def read_tasks(patterns: Sequence[str]) -> list[Task]:
    """Return the tasks in the files that match glob patterns, on a disk or in an object store, in their order.

    A pattern with the name of a published task, `mmlu:test/*.csv`, is one task of this name with all its files.

    Raises `UserError` if a pattern matches no file, two files have one name, or a file is invalid; names the file and
    the line.
    """
    named = [name_of(pattern) for pattern in patterns]
    paths = dict.fromkeys(path for name, pattern in named if name is None for path in matching(pattern))
    found = [*map(read_task, paths), *(published_task(name, pattern) for name, pattern in named if name is not None)]
    tasks: dict[str, Task] = {}
    for task in found:
        if task.name in tasks:
            raise UserError(
                f"{tasks[task.name].path} and {task.path}: two tasks would have the name `{task.name}`, and figures "
                "are told apart by it. Rename one of the files."
            )
        tasks[task.name] = task
    return list(tasks.values())


def matching(pattern: str) -> list[str]:
    found = list(files_matching(pattern, "tasks"))
    if not found:
        pattern = expand(pattern, "tasks")
        raise UserError(f"tasks: no file matches {pattern}. Patterns may use *, ? and **; check the folder.")
    return found


def read_task(path: str) -> Task:
    """Return the task in a file; raise `UserError` if the file is invalid."""
    lines = list(objects_of(path))
    form = Form()
    if lines and "kind" in lines[0][1]:
        form = form_of(*lines.pop(0))
    if not lines:
        raise UserError(f"{path}: no question is in it. A line is for example {EXAMPLE}")
    read = KINDS[form.kind].read
    questions = tuple(read(line, form, location) for location, line in lines)
    return Task(PurePath(path).name.removesuffix(".jsonl"), form.kind, questions, path, form)


def published_task(name: str, pattern: str) -> Task:
    """Return a published task with the questions of all files that match."""
    published, paths = PUBLISHED[name], matching(pattern)
    form, lines = published.form, (line for path in paths for line in published.lines(name, path))
    questions = tuple(KINDS[published.kind].read(line, form, location) for location, line in lines)
    if not questions:
        raise UserError(f"{pattern}: no question of {name} is in it.")
    return Task(name, published.kind, questions, pattern, form)


EXAMPLE = '{"context": "Two and three is", "choices": ["four", "five"], "answer": 1}.'


def objects_of(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the object of each line that is not empty."""
    content = read_bytes(path).removeprefix(BYTE_ORDER_MARK)
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            record = parsed(line, location)
            if not isinstance(record, dict):
                raise UserError(f"{location}: found {type(record).__name__}, expected a JSON object such as {EXAMPLE}")
            yield location, record


def form_of(location: str, line: dict[str, Any]) -> Form:
    """Return the settings in a file's first line."""
    for key, value in line.items():
        if key not in SETTINGS:
            near = did_you_mean(get_close_matches(key, SETTINGS, n=1))
            raise UserError(
                f"{location}: it has a `kind`, so it is the line of settings, which has no key `{key}`.{near} "
                f"It may have: {', '.join(SETTINGS)}."
            )
        if not isinstance(value, str):
            raise UserError(f"{location}: `{key}` is {type(value).__name__}, expected text.")
        encodable(value, location)
    if line["kind"] not in KINDS:
        near = did_you_mean(get_close_matches(line["kind"], KINDS, n=1))
        raise UserError(f"{location}: kind is {shown(line['kind'])}.{near} The kinds are: {', '.join(KINDS)}.")
    if line.get("gap") == "":
        raise UserError(f"{location}: `gap` is empty; it must be the mark that the choices of a cloze replace.")
    return Form(**line)
