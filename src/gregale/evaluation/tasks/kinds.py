"""The kinds of tasks: the keys of a line, the texts to score, and the metrics."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gregale.data.sources.base import encodable
from gregale.errors import UserError

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
    return mean_of("exact_match", right)


def accuracy(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Return `acc`: the fraction of questions whose answer has the largest log-likelihood, the first of equal ones."""
    right = [
        np.argmax(score.log_likelihoods) == question.answer for question, score in zip(questions, scores, strict=True)
    ]
    return mean_of("acc", right)


def accuracies(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Return `acc`, and `acc_norm`: the same with each log-likelihood divided by the characters of its choice.

    An empty choice is the least likely.
    """
    right = []
    for question, score in zip(questions, scores, strict=True):
        sizes = zip(score.log_likelihoods, question.sizes, strict=True)
        right.append(np.argmax([each / size if size else -math.inf for each, size in sizes]) == question.answer)
    return accuracy(questions, scores) | mean_of("acc_norm", right)


def matches(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Return `acc`, the fraction of answers that greedy decoding gives, and `perplexity`: exp(-mean log-likelihood)."""
    del questions
    loss = mean_of("loss", [-score.log_likelihoods[0] for score in scores])
    perplexity = float(np.exp(loss["loss"]))
    return {
        **mean_of("acc", [score.greedy[0] for score in scores]),
        "perplexity": perplexity,
        "perplexity_stderr": perplexity * loss["loss_stderr"],  # by the derivative of exp
    }


KINDS: dict[str, Kind] = {
    "multiple_choice": Kind(read_multiple_choice, accuracies),
    "cloze": Kind(read_cloze, accuracy),
    "greedy_match": Kind(read_greedy_match, matches),
    "exact_match": Kind(read_exact_match, equal_answers, generates=True),
}


def mean_of(name: str, values: Sequence[float | bool]) -> dict[str, float]:
    """Return the mean of n values and its standard error sqrt(sum (value - mean)^2 / (n - 1) / n), NaN for n = 1."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return {name: float(array.mean()), f"{name}_stderr": float(error)}


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
