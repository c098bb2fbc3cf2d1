"""Files of prompts: what is read, what is refused, which prompts are continued together."""

import pytest

from gregale.errors import UserError
from gregale.inference.generate import width_of
from gregale.programs.runtime.sampler import batches_of, read_prompts


def written(folder, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_a_text_has_a_prompt_a_line(tmp_path):
    for content in ("one \n two\u2028ü", "one \n two\u2028ü\n", "\ufeffone \r\n two\u2028ü\r\n"):
        found = read_prompts(written(tmp_path, "prompts.txt", content), 4)
        assert [(each.prompt, each.seed, each.named) for each in found] == [("one ", 4, {}), (" two\u2028ü", 4, {})]


def test_json_lines_have_seeds_and_names(tmp_path):
    lines = '{"prompt": "one\\n"}\n{"id": null, "seed": 7, "prompt": " "}\n'
    found = read_prompts(written(tmp_path, "prompts.jsonl", lines), 4)
    assert [(each.prompt, each.seed, each.named) for each in found] == [("one\n", 4, {}), (" ", 7, {"id": None})]
    assert found[1].source.endswith("prompts.jsonl, line 2")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "", "the file is empty"),
        ("nowhere/p.txt", None, "nowhere/p.txt"),
        ("p.txt", "one\n\ntwo\n", "p.txt, line 2: the prompt is empty"),
        ("p.txt", b"one\n\xff", "byte 4 is not UTF-8"),
        ("p.json", "[]", "JSON lines are .jsonl"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ("p.jsonl", '"a"', "line 1: found str, expected an object"),
        ("p.jsonl", '{"prompt": "a", "sed": 1}', "line 1: `sed` is not a valid key. Did you mean `seed`?"),
        ("p.jsonl", '{"text": "a"}', "line 1: `text` is not a valid key. Valid keys: prompt, seed, id."),
        ("p.jsonl", '{"prompt": ""}', "line 1: `prompt` is empty"),
        ("p.jsonl", '{"prompt": ["a"]}', "line 1: `prompt` is ['a']; it has to be a text"),
        ("p.jsonl", '{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        ("p.jsonl", '{"prompt": "a", "seed": -1}', "`seed` is -1; it has to be a whole number from 0 to 2,147,483,647"),
        ("p.jsonl", '{"prompt": "a", "seed": 1.5}', "`seed` is 1.5"),
    ],
)
def test_what_is_no_prompt_is_told_with_its_line(tmp_path, name, content, words):
    with pytest.raises(UserError) as raised:
        read_prompts(written(tmp_path, name, content) if content is not None else str(tmp_path / name), 0)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_batches_have_prompts_of_one_length_in_the_order_of_the_file():
    lengths = [5, 70, 9, 300, 64, 65, 1, 66]
    found = list(batches_of(lengths, 2))
    assert found == [[0, 2], [1, 5], [3], [4, 6], [7]]
    assert all(len({width_of(lengths[number]) for number in batch}) == 1 for batch in found)
