"""`gregale sample --chat` and `--messages`: prompts of the run's template, messages that leave, ends, refusals."""

import io
import json
import shutil
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest

from gregale.data.chat.renderer import ChatEncoder
from gregale.data.chat.template import built_in
from gregale.data.sources.chat import ChatSource
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from gregale.evaluation.tasks import read_tasks
from gregale.inference.generate import filled
from gregale.programs.runtime.evaluation import asked_in
from gregale.programs.runtime.sampler import Continuation, Dialogue, TextFormat, chat_prompts, converse, lines_of_user
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from tests.data.chat.families import TALKS, TEMPLATES, without_generation
from tests.data.chat.test_templates import tokenizer_with

BYTES = BytesTokenizer()
NAMES = "<|im_end|> the <|end_of_document|>"  # of special tokens, which are text in messages
SPOKEN = [*TALKS["emoji"][:2], {"role": "user", "content": NAMES}, {"role": "assistant", "content": NAMES}]


def with_built_in() -> BytesTokenizer:
    found = BytesTokenizer()
    found.chat_template = built_in(found.control_tokens, found.end_name)
    return found


@pytest.mark.parametrize("name", ["built-in", "chatml", "llama 3.1"])
def test_a_prompt_is_the_begin_of_the_training_example(tmp_path, name):
    """Up to the first token that the loss is on, with the day of the training; an answer ends with the last one."""
    run, config = RunDirectory(tmp_path), TrainConfig("chatty", 1)
    source = ChatSource(files=("{examples}/chat_small.jsonl",), date="2024-02-29", loss_on="last")
    run.write_config(replace(config, data=replace(config.data, sources={"facts": source})))
    tokenizer = with_built_in() if name == "built-in" else tokenizer_with(without_generation(TEMPLATES[name]))
    own = tokenizer.chat_template
    tokenizer.chat_template = replace(own, text="{{ strftime_now('%d %b ') }}" + own.text)
    assert source.parts(), "the example's conversations are there"
    with chat_prompts(run, tokenizer) as chat, ChatEncoder(tokenizer) as encoder:
        for count in (2, 4):
            example = encoder.encode(source.conversation({"messages": SPOKEN[:count]}, "here"))
            first = int(example.supervised.argmax())
            assert chat.ids({"messages": SPOKEN[: count - 1]}, "here") == example.ids[:first].tolist()
            assert example.ids[example.supervised][-1] in chat.form.ends
        with pytest.raises(UserError, match="here: the last message is the assistant's"):
            chat.ids({"messages": SPOKEN}, "here")


class Words:
    """Prompts with a token for each message, and one for each character."""

    def ids(self, given, source):
        return [0] * sum(1 + len(each["content"]) for each in given["messages"])


def test_the_oldest_messages_leave_a_long_conversation(capsys):
    dialogue = Dialogue(Words(), "s", 300)
    for size, wanted, width in ((2, [2], 256), (200, [2, 0, 200], 256), (94, [200, 0, 94], 512)):
        prompt = dialogue.ask("x" * size, 5)
        assert [len(each["content"]) for each in dialogue.messages] == wanted
        assert (len(prompt.tokens), filled([prompt])[0].shape) == (2 + len(wanted) + sum(wanted), (1, width))
        dialogue.messages.append({"role": "assistant", "content": ""})
    assert capsys.readouterr().err.count("The oldest 2 messages leave the conversation") == 1
    with pytest.raises(UserError, match=r"a prompt of 302 tokens, and the model's context has room for 300 beside"):
        dialogue.ask("x" * 299, 5)
    assert len(dialogue.messages) == 4


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
    typed = Mock(side_effect=["a", KeyboardInterrupt, "", " ", "\udcffb", EOFError])
    monkeypatch.setattr("builtins.input", typed)
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


def test_answers_are_the_same_in_a_conversation_and_in_a_file(gregale, printed, inputs, chatty, monkeypatch, capsys):
    drawn = ["chatty", "--temperature", "0", "--tokens", "4"]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nü"))
    assert gregale("sample", *drawn, "--chat", "--system", "s") == 0
    out, err = capsys.readouterr()
    assert "The oldest 2 messages leave the conversation" in err
    talks = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}]} for text in "aü"]
    talks[0]["id"], talks[1]["seed"] = 7, 3
    (inputs / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    found = [json.loads(line) for line in printed("sample", *drawn, "--messages", "talks.jsonl").splitlines()]
    assert [each["text"] for each in found] == out.splitlines()
    assert list(found[0]) == ["id", "messages", "text", "tokens", "ended", "seed"]
    assert (found[0]["id"], found[1]["messages"], found[1]["seed"]) == (7, talks[1]["messages"], 3)


def test_tasks_ask_by_the_template(inputs, chatty, evaluated, refused):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    lines = [{"kind": "exact_match"}, {"messages": talk, "answer": "1"}, {"context": "b", "answer": "1"}]
    for name, own in {"mixed": lines, "plain": [lines[0], lines[2]]}.items():
        (inputs / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    run, form, tasks = RunDirectory(chatty), TextFormat(with_built_in()), read_tasks(["mixed.jsonl", "plain.jsonl"])
    with chat_prompts(run, form.tokenizer) as chat:
        spoken = [chat.ids({"messages": each}, "") for each in (talk, [{"role": "user", "content": "b"}])]
    mixed, plain = asked_in(tasks, run, form, chat=False).prompts
    assert (mixed.prompts, mixed.stops) == (spoken, [])
    assert (plain.prompts, plain.stops) == ([form.ids("b")], ["\n\n"])
    (mixed, plain), ends = (asked := asked_in(tasks, run, form, chat=True)).prompts, asked.form.ends
    assert (mixed.prompts, plain.prompts, ends) == (spoken, spoken[1:], chat.form.ends)
    assert evaluated("chatty", "--tasks", "mixed.jsonl")["exact_match.mixed"] == 0
    assert "whole has no chat template" in refused("eval", "whole", "--chat", "--tasks", "plain.jsonl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["whole", "--chat"], "whole has no chat template, because it was not trained on conversations. `gregale"),
        (["chatty", "hello", "--chat"], "a prompt is for a text to continue"),
        (["chatty", "--chat", "--parse_special", "true"], "parse_special is for a text to continue"),
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
