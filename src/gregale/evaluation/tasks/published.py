"""Files of published tasks as they are: `--tasks hellaswag:hellaswag_val.jsonl`.

Each question becomes a line of `gregale.evaluation.tasks.files`, with the text that lm-evaluation-harness gives a model
without solved questions before it.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any

from gregale.data.sources.base import BYTE_ORDER_MARK, read_bytes
from gregale.data.sources.text import parsed
from gregale.errors import UserError
from gregale.evaluation.tasks.kinds import Form
from gregale.settings import did_you_mean

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
    form: Form = Form()  # noqa: RUF009

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
