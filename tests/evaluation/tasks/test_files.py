"""Files of tasks: what they may say, and each mistake told in one line with the file and the line."""

import json
import re

import pytest

from gregale.errors import UserError
from gregale.evaluation.tasks import Pair, read_tasks

QUESTION = {"context": "Two and three is", "choices": ["four", "five"], "answer": 1}


def written(path, *lines) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_multiple_choice_is_what_a_file_without_settings_is(tmp_path):
    path = written(tmp_path / "sums.v2.jsonl", {**QUESTION, "id": 7}, "", QUESTION)
    (task,) = read_tasks([path])
    assert (task.name, task.kind) == ("sums.v2", "multiple_choice")
    first, second = task.questions
    assert first.pairs == (Pair("Two and three is", " four"), Pair("Two and three is", " five"))
    assert (first.answer, first.sizes) == (1, (4, 4))
    assert (first.place, second.place) == (f"{path}, line 1", f"{path}, line 3")


def test_settings_stand_in_the_first_line(tmp_path):
    settings = {"kind": "multiple_choice", "prefix": "1 + 1\n2\n\n", "delimiter": "\n"}
    (task,) = read_tasks([written(tmp_path / "a.jsonl", "\ufeff" + json.dumps(settings), QUESTION)])
    assert task.questions[0].pairs[0] == Pair("1 + 1\n2\n\nTwo and three is", "\nfour")


def test_a_cloze_scores_what_stands_after_its_gap(tmp_path):
    line = {"context": "Ann thanked Mary, for _ had helped.", "choices": ["Ann", "Mary"], "answer": 1}
    (task,) = read_tasks([written(tmp_path / "a.jsonl", {"kind": "cloze", "prefix": "P. "}, line)])
    assert task.questions[0].pairs == (
        Pair("P. Ann thanked Mary, for Ann", " had helped."),
        Pair("P. Ann thanked Mary, for Mary", " had helped."),
    )
    line["context"] = "x_1 = ??; print(x_1)"
    (task,) = read_tasks([written(tmp_path / "a.jsonl", {"kind": "cloze", "gap": "??"}, line)])
    assert task.questions[0].pairs[0] == Pair("x_1 = Ann", "; print(x_1)")


def test_a_greedy_match_has_its_answer_in_words(tmp_path):
    line = {"context": "The capital of France is", "answer": "Paris"}
    (task,) = read_tasks([written(tmp_path / "a.jsonl", {"kind": "greedy_match"}, line)])
    assert task.questions[0].pairs == (Pair("The capital of France is", " Paris"),)


def test_patterns_find_files_once_and_in_order(tmp_path):
    for name in ("b", "a"):
        written(tmp_path / f"{name}.jsonl", QUESTION)
    tasks = read_tasks([str(tmp_path / "b.jsonl"), str(tmp_path / "*.jsonl")])
    assert [task.name for task in tasks] == ["b", "a"]
    assert read_tasks([]) == []


def test_files_may_lie_in_a_store(s3):
    (s3 / "sums.jsonl").write_bytes(json.dumps(QUESTION).encode())
    (task,) = read_tasks([f"{s3}/*.jsonl"])
    assert (task.name, task.questions[0].place) == ("sums", f"{s3}/sums.jsonl, line 1")


WRONG_CHOICES = "`choices` has to be a list of two texts or more; found"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"context": "a", ', r"not JSON \(.* at column \d+\)"),
        ("[1, 2]", "found list, expected a JSON object such as"),
        ({"choices": ["a", "b"], "answer": 0}, "no key `context`; the keys of this line are: choices, answer"),
        ({**QUESTION, "context": 5}, "`context` is int, expected text"),
        ({**QUESTION, "choices": "ab"}, f"{WRONG_CHOICES} str"),
        ({**QUESTION, "choices": ["a"]}, f"{WRONG_CHOICES} 1 choices"),
        ({**QUESTION, "answer": 2}, "`answer` is 2, but the 2 choices have the numbers 0 to 1"),
        ({**QUESTION, "answer": True}, "`answer` is bool, expected the number of the right choice"),
        ('{"context": "a", "choices": ["a", "b"], "answer": ' + "9" * 5000 + "}", "`answer` is 9{20}, but"),
        ({**QUESTION, "context": "\ud800"}, "half a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(tmp_path, line, words):
    path = written(tmp_path / "a.jsonl", {"kind": "multiple_choice"}, "", *[QUESTION] * 4, line)
    with pytest.raises(UserError, match=words) as caught:
        read_tasks([path])
    assert str(caught.value).startswith(f"{path}, line 7: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"kind": "cloze"}, QUESTION, "line 2: a cloze has one gap '_'.* it is there 0 times"),
        ({"kind": "cloze"}, {**QUESTION, "context": "a _ b _"}, "it is there 2 times"),
        ({"kind": "cloze"}, {**QUESTION, "context": "a _"}, "nothing stands after it"),
        ({"kind": "greedy_match"}, QUESTION, "line 2: `answer` is int, expected text"),
        ({"kind": "greedy-match"}, QUESTION, r"line 1: kind is 'greedy-match'\. Did you mean `greedy_match`\? The ki"),
        ({"kind": 3}, QUESTION, "line 1: `kind` is int, expected text"),
        ({"kind": "cloze", "prefx": "a"}, QUESTION, "line 1: .* has no key `prefx`. Did you mean `prefix`"),
        ({"kind": "cloze", "gap": ""}, QUESTION, "line 1: `gap` is empty"),
        ({"kind": "cloze", "prefix": "a\ud800"}, QUESTION, "line 1: character 1 of the text is .* half a surrogate"),
        ({"kind": "cloze"}, "", "a.jsonl: no question is in it. A line is for example"),
    ],
)
def test_a_form_that_does_not_fit(tmp_path, first, second, words):
    with pytest.raises(UserError, match=words):
        read_tasks([written(tmp_path / "a.jsonl", first, second)])


def test_files_that_are_not_there_or_no_text(tmp_path):
    with pytest.raises(UserError, match=r"tasks: no file matches .*none-\*.jsonl"):
        read_tasks([str(tmp_path / "none-*.jsonl")])
    (tmp_path / "a.jsonl").write_bytes(b'{"context": "\xe9"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 1: byte 13 of the line, 0xe9, is not UTF-8"):
        read_tasks([str(tmp_path / "a.jsonl")])
    paths = [written(tmp_path / folder / "same.jsonl", QUESTION) for folder in ("x", "y")]
    with pytest.raises(UserError, match=re.escape(f"{paths[0]} and {paths[1]}: two tasks would have the name `same`")):
        read_tasks(paths)
