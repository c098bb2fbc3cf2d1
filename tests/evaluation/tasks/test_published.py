"""Files of published tasks: the texts that a model is given, written out by hand."""

import json

import pytest

from gregale.errors import UserError
from gregale.evaluation.tasks import read_tasks

SWAG = {
    "ind": 4,
    "activity_label": "Sailing",
    "ctx_a": "A boat leaves. [header] The wind [substeps] turns.",
    "ctx_b": "the crew",
    "endings": ["sleeps [title] Nobody steers.", "hoists  a sail."],
    "label": "1",
}
STEM = {"stem": "What blows?", "choices": [{"text": "wind", "label": "1"}, {"text": "stone", "label": "2"}]}
HUB = {"question": "What blows?", "choices": {"text": ["wind", "stone"], "label": ["A", "B"]}, "answerKey": "B"}
CASES = {
    "hellaswag": (
        SWAG,
        "Sailing: A boat leaves. The wind turns. The crew",
        [" sleeps. Nobody steers.", " hoists a sail."],
        1,
    ),
    "lambada": ({"text": "He set the sail"}, "He set the", [" sail"], 0),
    "arc_easy": ({"question": STEM, "answerKey": "2"}, "Question: What blows?\nAnswer:", [" wind", " stone"], 1),
    "arc_challenge": (HUB, "Question: What blows?\nAnswer:", [" wind", " stone"], 1),
    "piqa": ({"goal": "tie a knot", "sol1": "a", "sol2": "b"}, "Question: tie a knot\nAnswer:", [" a", " b"], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_the_question_written_out(name, tmp_path):
    row, context, choices, answer = CASES[name]
    (tmp_path / "valid.jsonl").write_text(f"{json.dumps(row)}\n\n")
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    (task,) = read_tasks([f"{name}:{tmp_path}/*.jsonl"])
    (question,) = task.questions
    assert task.name == name
    assert [pair.context for pair in question.pairs] == [context] * len(choices)
    assert [pair.continuation for pair in question.pairs] == choices
    assert question.answer == answer


def test_the_files_of_all_subjects_are_one_task(tmp_path):
    (tmp_path / "high_school_physics_test.csv").write_text('"What, then, floats?",cork,"a ""stone""",lead,iron,A\n')
    (tmp_path / "anatomy_test.csv").write_text("Which\nbone?,a,b,c,d,D\n".replace("\n", " ", 1))
    (task,) = read_tasks([f"mmlu:{tmp_path}/*.csv"])
    about = "The following are multiple choice questions (with answers) about {}.\n\n"
    found = {question.pairs[0].context: question.answer for question in task.questions}
    assert found == {
        about.format("anatomy") + "Which bone?\nA. a\nB. b\nC. c\nD. d\nAnswer:": 3,
        about.format("high school physics")
        + 'What, then, floats?\nA. cork\nB. a "stone"\nC. lead\nD. iron\nAnswer:': 0,
    }
    assert [pair.continuation for pair in task.questions[0].pairs] == [" A", " B", " C", " D"]


def test_the_last_number_of_an_answer_is_compared(tmp_path):
    rows = [
        {"question": "How many?", "answer": "It is 3 * 400 = <<3*400=1200>>1200.\n#### 1,200"},
        {"question": "And now?", "answer": "#### -7"},
    ]
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (task,) = read_tasks([f"gsm8k:{tmp_path}/test.jsonl"])
    assert [question.prompt for question in task.questions] == [
        "Question: How many?\nAnswer:",
        "Question: And now?\nAnswer:",
    ]
    assert [question.expected for question in task.questions] == ["1200", "-7"]
    assert task.metrics_of_answers([" So 3 and then $1,200.", "7"])["exact_match"] == 0.5
    assert task.metrics_of_answers(["The answer is 1200", "x is -7.\n"])["exact_match"] == 1
    assert task.metrics_of_answers(["no number", ""])["exact_match"] == 0


def test_what_is_no_published_task_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"goal": "x", "sol1": "a", "label": 0}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: no question of piqa as it is .*sol2.* goal, sol1, label"):
        read_tasks([f"piqa:{tmp_path}/a.jsonl"])
    with pytest.raises(UserError, match=r"`helaswag:`, .* mean `hellaswag`\? They are: hellaswag, lambada"):
        read_tasks(["helaswag:x.jsonl"])
    (tmp_path / "b.jsonl").write_text(
        '{"question": "x", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}\n'
    )
    with pytest.raises(UserError, match=r"b.jsonl has the keys of arc_easy or arc_challenge; give --tasks arc_easy:"):
        read_tasks([f"{tmp_path}/b.jsonl"])
    with pytest.raises(UserError, match="arc_easy is a published task; name its files too"):
        read_tasks(["arc_easy"])
    with pytest.raises(UserError, match="no file matches"):
        read_tasks(["mmlu:nowhere/*.csv"])
