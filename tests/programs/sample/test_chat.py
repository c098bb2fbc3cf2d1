"""`gregale sample --chat` and `--messages`: prompts of the run's template, messages that leave, ends, refusals."""

import io
import json
import shutil
from dataclasses import asdict, replace

import pytest

from gregale.data.chat.encoding import ChatEncoder
from gregale.data.chat.template import built_in
from gregale.data.sources.chat import ChatRows, ChatSource
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from gregale.inference.generate import filled, width_of
from gregale.programs.sample.chat import Dialogue, chat_prompts, converse, lines_of_user
from gregale.programs.sample.text_format import Continuation, TextFormat
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from tests.data.chat.families import TALKS, TEMPLATES, without_generation
from tests.data.chat.test_templates import tokenizer_with

BYTES = BytesTokenizer()
SPOKEN = [*TALKS["emoji"][:3], {"role": "assistant", "content": "<|im_end|> the <|end_of_document|>"}]


def with_built_in() -> BytesTokenizer:
    found = BytesTokenizer()
    found.chat_template = built_in(found.control_tokens, found.end_name)
    return found


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.write_config(TrainConfig("chatty", 1))
    return run


@pytest.mark.parametrize("name", ["built-in", "chatml", "llama 3.1"])
def test_a_prompt_is_the_begin_of_the_training_example(run, name):
    """Up to the first token that the loss is on; an answer ends with the last one."""
    templates = {key.lower(): text for key, text in TEMPLATES.items()}
    tokenizer = with_built_in() if name == "built-in" else tokenizer_with(without_generation(templates[name]))
    with chat_prompts(run, tokenizer) as chat, ChatEncoder(tokenizer) as encoder:
        for count in (2, 4):
            talk = {"messages": SPOKEN[:count]}
            day = chat._rows.date
            example = encoder.encode(ChatRows(loss_on="last", date=day).conversation(talk, "here"))
            first = int(example.supervised.argmax())
            assert chat.ids({"messages": SPOKEN[: count - 1]}, "here") == example.ids[:first].tolist()
            assert example.ids[example.supervised][-1] in chat.form.ends
        assert len({*chat.form.ends}) == len(chat.form.ends)
        with pytest.raises(UserError, match="here: the last message is the assistant's"):
            chat.ids({"messages": SPOKEN}, "here")


def test_the_day_is_that_of_the_training(run):
    config = TrainConfig("chatty", 1)
    sources = {"facts": ChatSource(files=("facts.jsonl",), date="2024-02-29")}
    run.write_config(replace(config, data=replace(config.data, sources=sources)))
    tokenizer = with_built_in()
    text = "{{ strftime_now('%d %b ') }}" + tokenizer.chat_template.text
    tokenizer.chat_template = replace(tokenizer.chat_template, text=text)
    with chat_prompts(run, tokenizer) as chat:
        assert BYTES.decode(chat.ids({"messages": SPOKEN[:1]}, "here")).startswith("29 Feb user")


class Words:
    """Prompts with a token for each message, and one for each character."""

    def ids(self, given, source):
        return [0] * sum(1 + len(each["content"]) for each in given["messages"])


def test_the_oldest_messages_leave_a_long_conversation(capsys):
    dialogue = Dialogue(Words(), "s", 10)
    for asked, wanted in (("abc", ["abc"]), ("de", ["abc", "", "de"]), ("fgh", ["de", "", "fgh"])):
        prompt = dialogue.ask(asked, 5)
        assert [each["content"] for each in dialogue.messages] == wanted
        assert (len(prompt.tokens), prompt.seed) == (2 + sum(1 + len(each) for each in wanted), 5)
        dialogue.answered("")
    assert capsys.readouterr().err.count("The oldest 2 messages leave the conversation") == 1
    with pytest.raises(UserError, match=r"a prompt of 11 tokens, and the model's context has room for 10 beside"):
        dialogue.ask("12345678", 5)
    assert len(dialogue.messages) == 4


def test_a_conversation_has_few_padded_lengths():
    dialogue = Dialogue(Words(), "", 5000)
    widths = {filled([dialogue.ask("x" * size, 0)])[0].shape[1] for size in (1, 70, 150, 200, 300, 290)}
    assert widths == {256, 512, 1024}
    assert width_of(70) == 128


def test_an_interrupt_ends_the_answer_and_in_a_terminal_not_the_conversation():
    dialogue, shown = Dialogue(Words(), "", 100), []

    def answer_to(message):
        dialogue.ask(message, 0)
        text = Continuation(TextFormat(BYTES), 9)

        def pieces():
            yield text.push(message.encode())
            if message == "stop":
                raise KeyboardInterrupt
            yield text.push([BYTES.end_of_document, 65])

        return text, pieces()

    converse(dialogue, ["a", "stop", "x" * 101, "b"], answer_to, shown.append, is_terminal=True)
    assert "".join(shown) == "a\nstop\nb\n"
    assert [each["content"] for each in dialogue.messages] == ["a", "a", "stop", "stop", "b", "b"]
    with pytest.raises(UserError, match="of 102 tokens"):
        converse(dialogue, ["x" * 101], answer_to, shown.append, is_terminal=False)
    with pytest.raises(KeyboardInterrupt):
        converse(dialogue, ["stop", "b"], answer_to, shown.append, is_terminal=False)
    assert "".join(shown).endswith("b\nstop\n")


def test_a_terminal_discards_an_interrupted_line(monkeypatch, capsys):
    typed = iter(["a", KeyboardInterrupt, "", " ", "\udcffb", EOFError])

    def read(prompt):
        found = next(typed)
        if not isinstance(found, str):
            raise found
        return found

    monkeypatch.setattr("builtins.input", read)
    assert list(lines_of_user(is_terminal=True)) == ["a", "\ufffdb"]
    assert "Ctrl-D ends the conversation." in capsys.readouterr().err


@pytest.fixture(scope="module")
def chatty(inputs, whole):
    """The tiny run, as if it had the built-in template."""
    folder = inputs / "runs" / "chatty"
    shutil.copytree(whole, folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    template = asdict(with_built_in().chat_template)
    (folder / "tokenizer.json").write_text(json.dumps(saved | {"chat_template": template}))
    return folder


DRAWN = ["--temperature", "0", "--tokens", "4"]


def test_answers_are_the_same_in_a_conversation_and_in_a_file(gregale, inputs, chatty, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nü"))
    assert gregale("sample", "chatty", "--chat", "--system", "s", *DRAWN) == 0
    out, err = capsys.readouterr()
    answers = out.splitlines()
    assert len(answers) == 2, err
    system, first, second = (
        {"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("user", "ü"))
    )
    kept = [system, first, {"role": "assistant", "content": answers[0]}, second]
    left = [system, second] if "leave the conversation" in err else kept
    talks = [{"messages": [system, first], "id": 7}, {"messages": left, "seed": 3}]
    (inputs / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    assert gregale("sample", "chatty", "--messages", "talks.jsonl", *DRAWN) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["text"] for each in found] == answers
    assert list(found[0]) == ["id", "messages", "text", "tokens", "ended", "seed"]
    assert (found[0]["id"], found[1]["messages"], found[1]["seed"]) == (7, left, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["whole", "--chat"],
            "whole has no chat template, because it was not trained on conversations. `gregale sample",
        ),
        (["chatty", "hello", "--chat"], "a prompt, prompts and parse_special are for texts"),
        (["chatty", "--chat", "--parse_special", "true"], "a prompt, prompts and parse_special are for texts"),
        (["chatty", "--system", "s"], "system is for --chat"),
        (["chatty", "--messages", '{"messages": []}'], "line 1: `messages` is empty, expected a list of objects"),
        (["chatty", "--messages", '{"messages": 1, "sed": 1}'], "`sed` is not a valid key. Did you mean `seed`?"),
        (["chatty", "--messages", '{"messages": [{"role": "user", "content": "' + "x" * 40 + '"}]}'], "context is 32"),
    ],
)
def test_what_has_no_answer_is_refused(refused, inputs, chatty, options, words):
    if "--messages" in options:
        (inputs / "bad.jsonl").write_text(options[-1])
        options = [*options[:-1], "bad.jsonl"]
    assert words in refused("sample", *options)
