r"""Scored tasks by `type`: their files, questions and continuations.

`read_tasks` reads the files and `encoded` turns them into tokens. `gregale.programs.runtime.evaluation.Scorer` computes
scores with a model, and `Task.metrics` computes metrics from them. `SlidingWindows` cuts documents for the same scorer.

Text becomes tokens as in lm-evaluation-harness, so that the results are equal:

- white space at the end of a context belongs to the continuation: tokens begin with a space and do not end with one
- the continuation's tokens are those of context + continuation after the number of the context's own tokens
- a continuation without a context follows the token that ends a document
- a text that is too long for a window is cut from the left

A published question becomes a line of such a file, with the text that lm-evaluation-harness gives a model
without solved questions before it.

    {"kind": "multiple_choice", "prefix": "Q: 1 + 1 =\nA: 2\n\n"}
    {"context": "Q: 2 + 3 =\nA:", "choices": ["4", "5", "6"], "answer": 1}

A file without a line of settings has multiple-choice questions. Unknown keys are ignored in a question's line and
rejected in the line of settings.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from gregale.data.examples import ExampleBatch, stacked
from gregale.data.sources.base import BYTE_ORDER_MARK, encodable, expand, files_matching, read_bytes
from gregale.data.sources.text import parsed
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.settings import did_you_mean, shown

KEYS_SHOWN = 20
CONVERSATION = ("messages", "tools", "documents")  # of a line: what a chat template gets


@dataclass(frozen=True)
class Form:
    """The first line of a file, if it has a `kind`: the common settings of all its questions."""

    kind: str = "multiple_choice"  # a name of `KINDS`
    prefix: str = ""  # text before every context, such as solved questions
    delimiter: str = " "  # text between a context and a choice or an answer
    gap: str = "_"  # the mark that the choices of a cloze replace
    stop: str = "\n\n"  # text that ends a generated answer
    extract: str = ""  # regular expression: the first group of its last match is compared; empty: the whole answer


class Pair(NamedTuple):
    """A context, and the scored text after it."""

    context: str
    continuation: str


@dataclass(frozen=True)
class Question:
    """One line of a file: choices to score, or a prompt whose answer is generated."""

    pairs: tuple[Pair, ...]  # one for each choice
    answer: int  # the index of the right one
    place: str  # the file and the line, for messages
    sizes: tuple[int, ...] = ()  # the divisors of the log-likelihoods, one for each choice
    prompt: str = ""
    conversation: dict[str, Any] = field(default_factory=dict)  # in place of the prompt: `messages`, `tools`
    expected: str = ""  # what `extract` finds in the right answer


class Score(NamedTuple):
    """The score of a question's choices by a model."""

    log_likelihoods: np.ndarray  # in nats, float64 [choice]
    greedy: np.ndarray  # whether each token is the model's likeliest, given all before it, bool [choice]


@dataclass(frozen=True)
class Kind:
    """`read` takes a line's object, the file's form and the location; it raises `UserError` for a wrong line."""

    read: Callable[[Mapping[str, Any], Form, str], Question]
    # of the scores, or with `generates` of what `extract` finds in the answers; by the name of the metric
    metrics: Callable[[Sequence[Question], Sequence[Any]], dict[str, float]]
    generates: bool = False


def read_multiple_choice(line: Mapping[str, Any], form: Form, location: str) -> Question:
    context, choices = text_of(line, "context", location), choices_of(line, location)
    pairs = tuple(Pair(form.prefix + context, form.delimiter + choice) for choice in choices)
    return Question(pairs, answer_of(line, len(choices), location), location, tuple(map(len, choices)))


def read_cloze(line: Mapping[str, Any], form: Form, location: str) -> Question:
    context, choices = text_of(line, "context", location), choices_of(line, location)
    before, *after = context.split(form.gap)
    if len(after) != 1 or not after[0]:
        found = "nothing stands after it" if len(after) == 1 else f"it is there {len(after)} times"
        raise UserError(
            f"{location}: a cloze has one gap {form.gap!r} in its `context` and text after it, which is scored; "
            f"{found}. "
            'Another gap is named in the first line of the file: {"kind": "cloze", "gap": "___"}.'
        )
    pairs = tuple(Pair(form.prefix + before + choice, after[0]) for choice in choices)
    return Question(pairs, answer_of(line, len(choices), location), location)


def read_greedy_match(line: Mapping[str, Any], form: Form, location: str) -> Question:
    context, answer = text_of(line, "context", location), text_of(line, "answer", location)
    return Question((Pair(form.prefix + context, form.delimiter + answer),), 0, location)


def read_exact_match(line: Mapping[str, Any], form: Form, location: str) -> Question:
    expected = extracted(text_of(line, "answer", location), form.extract)
    if not expected:
        raise UserError(f"{location}: `answer` has nothing to compare: {form.extract!r} finds nothing in it.")
    if conversation := {name: line[name] for name in CONVERSATION if name in line}:
        return Question((), 0, location, expected=expected, conversation=conversation)
    prompt = form.prefix + text_of(line, "context", location)
    return Question((), 0, location, expected=expected, prompt=prompt)


def extracted(text: str, pattern: str) -> str:
    """Return the part of an answer that is compared, without `,` and `$` and a point at its end."""
    if not pattern:
        return text.strip()
    found = re.findall(pattern, text)
    if not found:
        return ""
    part = next(filter(None, found[-1]), "") if isinstance(found[-1], tuple) else found[-1]
    return re.sub(r"[,$]", "", part).strip().rstrip(".")


def equal_answers(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Return `exact_match`, the fraction of generated answers that are the expected ones."""
    right = [question.expected == answer for question, answer in zip(questions, answers, strict=True)]
    return estimate("exact_match", right)


def accuracy(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Return `acc`: the fraction of questions whose answer has the largest log-likelihood, the first of equal ones."""
    right = [
        np.argmax(score.log_likelihoods) == question.answer for question, score in zip(questions, scores, strict=True)
    ]
    return estimate("acc", right)


def accuracies(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Return `acc`, and `acc_norm`: the same with each log-likelihood divided by the characters of its choice.

    An empty choice is the least likely.
    """
    right = []
    for question, score in zip(questions, scores, strict=True):
        sizes = zip(score.log_likelihoods, question.sizes, strict=True)
        right.append(np.argmax([each / size if size else -math.inf for each, size in sizes]) == question.answer)
    return accuracy(questions, scores) | estimate("acc_norm", right)


def matches(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Return `acc`, the fraction of answers that greedy decoding gives, and `perplexity`: exp(-mean log-likelihood)."""
    del questions
    loss = estimate("loss", [-score.log_likelihoods[0] for score in scores])
    return estimate("acc", [score.greedy[0] for score in scores]) | perplexity(loss["loss"], loss["loss_stderr"])


KINDS: dict[str, Kind] = {
    "multiple_choice": Kind(read_multiple_choice, accuracies),
    "cloze": Kind(read_cloze, accuracy),
    "greedy_match": Kind(read_greedy_match, matches),
    "exact_match": Kind(read_exact_match, equal_answers, generates=True),
}


def estimate(name: str, above: ArrayLike, below: ArrayLike = 1) -> dict[str, float]:
    """Return sum a / sum b over n questions or documents, by default the mean, and its standard error to first order.

        sqrt(n / (n - 1) * sum (a - r b)^2) / sum b,  r = sum a / sum b

    They are the sample, so that tokens of one document need not be independent. Those with b = 0 do not count. Without
    any both are NaN; for n = 1 the error is NaN.
    """
    above, below = np.broadcast_arrays(np.asarray(above, np.float64), below)
    above, below = above[below > 0], below[below > 0]
    count, value, error = len(below), math.nan, math.nan
    if count:
        value = float(above.sum() / below.sum())
    if count > 1:
        error = float(math.sqrt(((above - value * below) ** 2).sum() * count / (count - 1)) / below.sum())
    return {name: value, f"{name}_stderr": error}


def perplexity(loss: float, error: float) -> dict[str, float]:
    """Return exp(loss), and its standard error by the derivative of exp."""
    value = float(np.exp(loss))
    return {"perplexity": value, "perplexity_stderr": value * error}


def text_of(line: Mapping[str, Any], key: str, location: str) -> str:
    """Return the text of a key; raise `UserError` if there is none."""
    value = value_of(line, key, location)
    if not isinstance(value, str):
        raise UserError(f"{location}: `{key}` is {type(value).__name__}, expected text.")
    return encodable(value, location)


def choices_of(line: Mapping[str, Any], location: str) -> list[str]:
    """Return at least two texts."""
    choices = value_of(line, "choices", location)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        found = f"{len(choices)} choices" if isinstance(choices, list) else type(choices).__name__
        raise UserError(f"{location}: `choices` has to be a list of two texts or more; found {found}.")
    return [encodable(choice, location) for choice in choices]


def answer_of(line: Mapping[str, Any], count: int, location: str) -> int:
    """Return the index of the right choice, from 0."""
    answer = value_of(line, "answer", location)
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise UserError(
            f"{location}: `answer` is {type(answer).__name__}, expected the number of the right choice, from 0."
        )
    if not 0 <= answer < count:
        raise UserError(f"{location}: `answer` is {answer}, but the {count} choices have the numbers 0 to {count - 1}.")
    return answer


def value_of(line: Mapping[str, Any], key: str, location: str) -> Any:
    if key not in line:
        found = ", ".join(list(line)[:KEYS_SHOWN]) or "none"
        raise UserError(f"{location}: no key `{key}`; the keys of this line are: {found}.")
    return line[key]


class Continuation(NamedTuple):
    """Tokens to score."""

    tokens: np.ndarray  # int32 [token]
    scored: int  # the number of last tokens to score, each given all tokens before it


class Continuations(Protocol):
    """Continuations by index.

    - `lengths`: input tokens of each, one less than all its tokens, int64 [continuation].
    """

    @property
    def lengths(self) -> np.ndarray: ...

    def __getitem__(self, index: int, /) -> Continuation: ...


class InMemory(list[Continuation]):
    """Continuations in a list."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(each.tokens) - 1 for each in self], np.int64)


def encoded(pairs: Sequence[Pair], tokenizer: Tokenizer, start: Sequence[int]) -> InMemory:
    """Return the tokens of each pair; a continuation has none if the context's last token contains all its characters.

    - `start`: tokens before every context.
    """
    pairs = [with_space_moved(pair) for pair in pairs]
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.context, pair.context + pair.continuation)))
    ids = dict(zip(texts, tokenizer.encode_all(texts), strict=True))
    nothing = np.zeros(0, np.int32)
    found = InMemory()
    for pair in pairs:
        given = ids[pair.context] if pair.context else nothing
        scored = ids[pair.context + pair.continuation][len(given) :]
        first = start if len(start) or pair.context else [tokenizer.end_of_document]
        found.append(Continuation(np.concatenate([np.array(first, np.int32), given, scored]), len(scored)))
    return found


def with_space_moved(pair: Pair) -> Pair:
    """Move white space at the context's end to the continuation."""
    context = pair.context.rstrip()
    return Pair(context, pair.context[len(context) :] + pair.continuation)


def filled(continuations: Sequence[Continuation], length: int) -> ExampleBatch:
    """Return continuations as rows of a batch, arrays [row, length], see `gregale.data.examples.make_example`.

    Each is cut from the left to `length` input tokens; a shorter one is padded; padding is not scored.
    """
    return stacked([_row(each, length) for each in continuations])


NOTHING = Continuation(np.zeros(1, np.int32), 0)  # a row that pads a batch


def _row(continuation: Continuation, length: int) -> ExampleBatch:
    tokens = continuation.tokens[-(length + 1) :]
    inputs = len(tokens) - 1
    places = np.arange(length)
    missing = (0, length - inputs)
    return {
        "tokens": np.pad(tokens[:-1], missing),
        "targets": np.pad(tokens[1:], missing),
        "loss_mask": ((places >= inputs - continuation.scored) & (places < inputs)).astype(np.float32),
        "positions": places.astype(np.int32),
    }


LETTERS = "ABCD"
NUMBER = r"-?[$0-9.,]*[0-9]"
Row = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """The form of a task's files.

    - `kind`: of the questions, a name of `KINDS`
    - `rows`: path -> location and content of each row
    - `line`: a row -> the line of the question, with `context` and so on; it raises `KeyError` for a missing part
    """

    kind: str
    rows: Callable[[str], Iterator[tuple[str, Row]]]
    line: Callable[[Row], dict[str, Any]]
    form: Form = Form()

    def lines(self, name: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield location and line of each question of a file; raise `UserError` for a row that is none of the task."""
        for location, row in self.rows(path):
            try:
                yield location, self.line(row)
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                found = ", ".join(map(str, row)) or "nothing"
                raise UserError(
                    f"{location}: no question of {name} as it is published ({type(error).__name__}: {error}); the row "
                    f"has: {found}. Without `{name}:` the file is one of Gregale's own form."
                ) from error


def objects(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the objects of JSON lines."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            row = parsed(line.encode(), location)
            yield location, row if isinstance(row, dict) else {}


def with_labels(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the objects of `NAME.jsonl`, with the labels of `NAME-labels.lst` where they have none themselves."""
    labels: list[str] = []
    for number, (location, row) in enumerate(objects(path)):
        if "label" not in row:
            labels = labels or _text(path.removesuffix(".jsonl") + "-labels.lst").split()
            row = {**row, "label": labels[number]} if number < len(labels) else row
        yield location, row


def csv_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a table without a header: question, four choices, the letter of the answer."""
    subject = re.sub(r"_(test|dev|val)$", "", PurePath(path).stem).replace("_", " ")
    for number, cells in enumerate(csv.reader(_text(path).splitlines(keepends=True)), 1):
        named = zip(("question", *LETTERS, "answer"), cells, strict=False)  # a short row lacks names
        yield f"{path}, row {number}", {"subject": subject, **dict(named)}


def _text(path: str) -> str:
    return read_bytes(path).removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace")


def hellaswag(row: Row) -> dict[str, Any]:
    """HellaSwag (Zellers et al. 2019, arXiv 1905.07830)."""

    def clean(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {"context": clean(context), "choices": [clean(each) for each in row["endings"]], "answer": int(row["label"])}


def lambada(row: Row) -> dict[str, Any]:
    """LAMBADA (Paperno et al. 2016, arXiv 1606.06031): the last word of a passage."""
    context, answer = row["text"].rsplit(" ", 1)
    return {"context": context, "answer": answer}


def arc(row: Row) -> dict[str, Any]:
    """ARC (Clark et al. 2018, arXiv 1803.05457), as its authors publish it or as a data set of the hub."""
    if isinstance(question := row["question"], Mapping):
        stem, choices = question["stem"], [(each["label"], each["text"]) for each in question["choices"]]
    else:
        stem, choices = question, list(zip(row["choices"]["label"], row["choices"]["text"], strict=True))
    answer = [label for label, _ in choices].index(row["answerKey"])
    return {"context": f"Question: {stem}\nAnswer:", "choices": [text for _, text in choices], "answer": answer}


def piqa(row: Row) -> dict[str, Any]:
    """PIQA (Bisk et al. 2019, arXiv 1911.11641)."""
    choices = [row["sol1"], row["sol2"]]
    return {"context": f"Question: {row['goal']}\nAnswer:", "choices": choices, "answer": int(row["label"])}


def mmlu(row: Row) -> dict[str, Any]:
    """MMLU (Hendrycks et al. 2020, arXiv 2009.03300)."""
    head = f"The following are multiple choice questions (with answers) about {row['subject']}.\n\n"
    lines = [row["question"].strip(), *(f"{letter}. {row[letter]}" for letter in LETTERS), "Answer:"]
    return {"context": head + "\n".join(lines), "choices": [*LETTERS], "answer": LETTERS.index(row["answer"])}


def gsm8k(row: Row) -> dict[str, Any]:
    """GSM8K (Cobbe et al. 2021, arXiv 2110.14168): the last number of the answer that a model generates."""
    return {"context": f"Question: {row['question']}\nAnswer:", "answer": row["answer"]}


PUBLISHED: dict[str, Published] = {
    "hellaswag": Published("multiple_choice", objects, hellaswag),
    "lambada": Published("greedy_match", objects, lambada),
    "arc_easy": Published("multiple_choice", objects, arc),
    "arc_challenge": Published("multiple_choice", objects, arc),
    "piqa": Published("multiple_choice", with_labels, piqa),
    "mmlu": Published("multiple_choice", csv_rows, mmlu),
    "gsm8k": Published("exact_match", objects, gsm8k, Form(stop="Question:", extract=NUMBER)),
}


def name_of(pattern: str) -> tuple[str | None, str]:
    """Return the published task that a pattern names, and its rest; raise `UserError` for an unknown task."""
    found = re.match(r"([a-z_0-9]+):(?!//)(.+)", pattern)
    if found is None:
        return None, pattern
    name, rest = found.groups()
    if name not in PUBLISHED:
        raise UserError(
            f"tasks: {pattern} begins with `{name}:`, which is no published task that Gregale reads."
            f"{did_you_mean(get_close_matches(name, PUBLISHED, n=1))} They are: {', '.join(PUBLISHED)}."
        )
    return name, rest


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
        if pattern in PUBLISHED:
            raise UserError(f"tasks: {pattern} is a published task; name its files too: --tasks {pattern}:FILES.")
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
    if "context" not in lines[0][1] and (names := published_as(lines[0][1])):
        raise UserError(f"{path} has the keys of {' or '.join(names)}; give --tasks {names[0]}:{path}.")
    read = KINDS[form.kind].read
    questions = tuple(read(line, form, location) for location, line in lines)
    return Task(PurePath(path).name.removesuffix(".jsonl"), form.kind, questions, path, form)


def published_as(row: Row) -> list[str]:
    """Return the published tasks that have a row with these keys."""

    def has(published: Published) -> bool:
        with suppress(LookupError, TypeError, ValueError, AttributeError, UserError):
            return bool(published.line(row))
        return False

    return [name for name, published in PUBLISHED.items() if published.rows is objects and has(published)]


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
