"""Conversations of data sets: their forms, formats and names; rows without one; tokens and masks in stores."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from gregale.checkpoint.store import Restored
from gregale.data.build import MASKS
from gregale.data.config import DataConfig
from gregale.data.examples import PackedRows, Packing, Windows
from gregale.data.mixtures import MixtureStage
from gregale.data.preparation import prepare
from gregale.data.sources import ChatCsvSource, ChatHuggingFaceSource, ChatParquetSource, ChatSource, JsonLinesSource
from gregale.data.tokenizers import BpeConfig, BytesTokenizer, from_json
from gregale.errors import KeyedError, UserError
from gregale.evaluation.bigram import bigram_bits_per_byte
from gregale.programs.evaluate import changed
from gregale.programs.runtime.evaluation import SlidingEvaluation
from gregale.programs.train.resume import check_text

END = BytesTokenizer.end_of_document
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SYSTEM = {"role": "system", "content": "s"}
CALLED = {"name": "f", "arguments": {"x": 1}}
CALL, CALLS, RULES = {"function": CALLED}, {"role": "assistant"}, {"role": "developer", "content": "s"}
PARTS = [{**TALK[0], "content": "ab"}, TALK[1]]


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def messages_of(source) -> list:
    return [json.loads(each.content.text)["messages"] for each in source.documents()]


def write_lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("form", "row", "wanted"),
    [
        ("messages", {"messages": TALK}, TALK),
        ("messages", {"messages": json.dumps(TALK), "tools": "[]"}, TALK),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, TALK),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": r'{"name": "f", "arguments": "{\"x\": 1}"}'}]},
            [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]}],
        ),
        ("messages", {"messages": [{"role": "user", "content": [text_part("a"), text_part("b")]}, TALK[1]]}, PARTS),
        ("sharegpt", {"conversations": [{"from": "Human ", "value": "a"}, {"from": "GPT", "value": "b"}]}, TALK),
        ("messages", {"messages": [{**TALK[0], "role": "human"}, {**TALK[1], "role": " Assistant\n"}]}, TALK),
        (
            "messages",
            {"messages": [{"role": "developer", "content": "s"}, {**TALK[1], "role": "model"}]},
            [RULES, TALK[1]],
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "tool_calls": json.dumps([CALL])}]},
            [{**CALLS, "tool_calls": [CALL]}],
        ),
        ("prompt", {"prompt": "a", "completion": "b", "system": "s"}, [SYSTEM, *TALK]),
        ("prompt", {"prompt": [SYSTEM, TALK[0]], "completion": "b", "system": "s"}, [SYSTEM, *TALK]),
        ("prompt", {"prompt": [SYSTEM, TALK[0]], "completion": TALK[1:]}, [SYSTEM, *TALK]),
        ("instruction", {"instruction": "a", "input": "", "output": "b"}, TALK),
        ("instruction", {"instruction": "i", "input": "a", "output": "b"}, [{**TALK[0], "content": "i\n\na"}, TALK[1]]),
    ],
)
def test_rows_of_each_form_are_messages(tmp_path, form, row, wanted):
    row = {name: value for name, value in row.items() if value != "[]"}
    assert messages_of(ChatSource(files=(write_lines(tmp_path / "a.jsonl", [row]),), form=form)) == [wanted]


def test_columns_can_have_other_names(tmp_path):
    row = {
        "chat": [{"who": "user", "text": "a"}, {"who": "assistant", "text": "b", "name": "x"}],
        "functions": [{"f": 1}],
    }
    names = {"messages": "chat", "role": "who", "content": "text", "tools": "functions"}
    (document,) = ChatSource(files=(write_lines(tmp_path / "a", [row]),), columns=names).documents()
    assert json.loads(document.content.text) == {"messages": [TALK[0], {**TALK[1], "name": "x"}], "tools": [{"f": 1}]}
    with pytest.raises(KeyedError, match=r"columns.rolle is no name in the form messages: messages, tools"):
        ChatSource(columns={"rolle": "who"})


def test_every_format_has_the_same_conversations(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    talks = [[*TALK], [TALK[0], call, {"role": "tool", "content": "1", "name": "f"}, TALK[1]]]
    rows = [{"messages": talk} for talk in talks]
    found = [ChatSource(files=(write_lines(tmp_path / "a.jsonl", rows),))]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "messages"], *([str(n), json.dumps(talk)] for n, talk in enumerate(talks))])
    found.append(ChatCsvSource(files=(f"{tmp_path}/a.csv",)))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found.append(ChatParquetSource(files=(f"{tmp_path}/a.parquet",)))
    assert [messages_of(source) for source in found] == [talks] * 3


def test_a_data_set_of_hugging_face_has_them_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}]).save_to_disk(tmp_path / "set")
    assert messages_of(ChatHuggingFaceSource(path=f"{tmp_path}/set", form="prompt")) == [TALK]


BAD = {
    "no `messages`; there are: text": {"text": "a"},
    "`messages` is empty, expected a list of objects": {"messages": []},
    "`messages` is text, and no JSON": {"messages": "hello"},
    "no `role`; there are: content": {"messages": [{"content": "a"}]},
    "(the role 'narrator' is none of user, assistant, system": {"messages": [{**TALK[0], "role": "narrator"}]},
    "`tool_calls` is text, and no JSON": {"messages": [{"role": "assistant", "tool_calls": "f()"}]},
    "`content` has a part of type 'image'": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "`content` has a part of type int": {"messages": [{"role": "assistant", "content": [1]}]},
    "half a surrogate pair": {"messages": [{"role": "user", "content": "\ud800"}]},
    "the chat template rejects the conversation (the built-in chat template has no tools)": {
        "messages": TALK,
        "tools": [{"name": "f"}],
    },
}


def data(path, cache, **changes) -> DataConfig:
    options = {"workers": 1, "held_out": 0.2, "cache": f"{cache}/cache", **changes}
    return DataConfig({"x": ChatSource(files=(str(path),), on_bad_document="skip", packing="concat")}, **options)


def test_bad_rows_are_named_and_left_out_or_stop_the_run(tmp_path):
    for number, (said, row) in enumerate(BAD.items()):
        file = write_lines(tmp_path / f"{number}", [{"messages": TALK}] * 40 + [row])
        (note,) = (line for line in prepare(data(file, tmp_path), 8, 0).notes if said in line)
        assert f"{file}, line 41: " in note
        source = ChatSource(files=(file,), packing="concat")
        with pytest.raises(UserError, match="line 41"):
            prepare(DataConfig({"x": source}, cache=f"{tmp_path}/c", workers=1), 8, 0)
    for role, said in (("function_call", "a function_call is no JSON"), (["user"], "`from` is list")):
        file = write_lines(tmp_path / "roles", [{"conversations": [{"from": role, "value": "a"}]}])
        with pytest.raises(UserError, match=said):
            list(ChatSource(files=(file,), form="sharegpt").documents())


def test_conversations_without_a_token_for_the_loss_are_counted_and_named_always(tmp_path):
    file = write_lines(tmp_path / "a", [{"messages": TALK}] * 20 + [{"messages": TALK[:1]}])
    for _ in range(2):
        notes = prepare(data(file, tmp_path), 8, 0).notes
        assert notes == (
            "data.sources.x:",
            "  1 conversation(s) without a token that the loss is on:",
            f"  {file}, line 21",
        )


def test_a_source_without_any_token_for_the_loss_is_refused(tmp_path):
    file = write_lines(tmp_path / "a", [{"messages": TALK[:1]}] * 20)
    with pytest.raises(UserError, match=r"data.sources.x: the loss is on none of its .* tokens. Conversations have it"):
        prepare(data(file, tmp_path), 8, 0)
    file = write_lines(tmp_path / "b", [{"messages": [{**TALK[0], "content": "many words"}, TALK[1]]}] * 20)
    cut = DataConfig({"x": ChatSource(files=(file,), long_documents="keep_start")}, cache=f"{tmp_path}/c", workers=1)
    with pytest.raises(UserError, match=r"long_documents keep_start leaves out .*; 1\d of them keep no token"):
        prepare(cut, 8, 0)
    talks = write_lines(tmp_path / "talks", [{"messages": TALK}] * 20)
    with pytest.raises(UserError, match=r"data.validation.y: the loss is on none of its"):
        prepare(data(talks, tmp_path, validation={"y": cut.sources["x"]}), 8, 0)


@pytest.fixture
def corpus(tmp_path):
    file = write_lines(tmp_path / "a", [{"messages": [*TALK, TALK[0], {**TALK[1], "content": "cd"}]}] * 60)
    text = JsonLinesSource(files=(write_lines(tmp_path / "t", [{"text": "plain text"}] * 60),))
    config = data(file, tmp_path)
    return prepare(DataConfig({**config.sources, "y": text}, held_out=0.2, cache=config.cache, workers=2), 16, 0)


TURNS = [(False, b"user\na"), (False, [END]), (False, b"assistant\n"), (True, b"b"), (True, [END])]
TURNS += [(False, b"user\na"), (False, [END]), (False, b"assistant\n"), (True, b"cd"), (True, [END])]
IDS = [token for _, part in TURNS for token in part]  # of a conversation; no second end of the document
MASK = [mask for mask, part in TURNS for _ in part]


def test_the_loss_mask_is_zero_where_a_target_is_not_the_assistants(corpus):
    stream = corpus.train_streams["x"]
    assert stream.read(0, len(IDS))[0].tolist() == IDS
    windows = Windows(stream, 16, cross_documents=False)
    for number in range(len(windows)):
        targets = [at % len(IDS) for at in range(number * 16 + 1, number * 16 + 17)]
        assert windows[number]["loss_mask"].tolist() == [at > 0 and MASK[at] for at in targets]
        assert windows[number]["targets"].tolist() == [IDS[at] for at in targets]
    plain = Windows(corpus.train_streams["y"], 16, cross_documents=False)
    assert plain[0]["loss_mask"].tolist() == [at != 11 for at in range(1, 17)]


def test_packed_rows_have_the_masks_of_their_documents(corpus):
    stream = corpus.train_streams["x"]
    assert ChatSource().packing == "fit"
    rows = PackedRows(stream, 2 * len(IDS), Packing("fit"))
    one = [*IDS[1:], *IDS[1:]]
    assert rows[0]["targets"].tolist() == [*one, 0, 0]
    assert rows[0]["loss_mask"].tolist() == [*MASK[1:], *MASK[1:], 0, 0]


def test_losses_and_bytes_count_the_assistants_tokens_alone(corpus):
    chat = corpus.held_out_streams["x"]
    rows = corpus.held_out.rows(range((len(chat) - 1) // 16))
    scored = (corpus.tokenizer.token_bytes[rows["targets"]] + rows["more_bytes"]) * rows["loss_mask"]
    targets = [at % len(IDS) for at in range(1, rows["targets"].size + 1)]
    assert scored.sum() == sum(MASK[at] and IDS[at] != END for at in targets)
    (bits,) = {bigram_bits_per_byte([chat], [chat], corpus.tokenizer.token_bytes)}
    assert bits < 1.5  # "b" or "c" after a line's end, and what follows each of them
    with pytest.raises(UserError, match="Leave stride out"):
        SlidingEvaluation.__call__(_Sliding(corpus.tokenizer), None, {"": [chat]})


class _Sliding:
    """What the check of `SlidingEvaluation` reads."""

    def __init__(self, tokenizer):
        self._tokenizer, self._stride = tokenizer, 4


def test_masks_are_part_of_a_stores_identity_and_other_stores_have_none(tmp_path, corpus):
    masked, plain = corpus.stores["sources.x"], corpus.stores["sources.y"]
    assert "supervised.npy" in masked.content
    assert plain.supervised is None
    assert not any(each.name == "supervised.npy" for each in plain.folder.iterdir())
    file = str(tmp_path / "a")
    each_loss = ("assistant", "last", "all")
    kinds = [ChatSource(files=(file,), loss_on=each, packing="concat") for each in each_loss]
    stores = [prepare(DataConfig({"x": kind}, cache=f"{tmp_path}/c", workers=1, held_out=0.2), 16, 0) for kind in kinds]
    assert len({each.fingerprint for each in stores}) == 3
    assert len({each.stores["sources.x"].content["tokens.bin"]["sha256"] for each in stores[:2]}) == 1
    assert stores[2].stores["sources.x"].supervised is None
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}")
    other = DataConfig({"x": kinds[0]}, cache=f"{tmp_path}/c", workers=1, chat_template=f"{tmp_path}/t.jinja")
    ids, _ = prepare(other, 16, 0).train_streams["x"].read(0, 12)
    assert ids.tolist() == [*b"ua", 256, *b"ab", 256, *b"ua", 256, *b"acd"][:12]


def test_older_rules_for_conversations_are_told_from_another_text(corpus):
    mixtures = (MixtureStage(0, {"x": 1, "y": 1}, 16),)
    check_text(Restored(8, None, {"data": corpus.fingerprint, "masks": 1}), mixtures, corpus)
    newer = rf"data: this version of Gregale has newer rules for .*: version {MASKS}, and the checkpoint's is "
    for masks, said in (({}, f"{newer}an older one.*--fresh"), ({"masks": 1}, f"{newer}1.*`--start_from RUN`")):
        with pytest.raises(UserError, match=said):
            check_text(Restored(8, None, {"data": "another", **masks}), mixtures, corpus)
    with pytest.raises(UserError, match=r"data: the text is not the one .* Put the old text back"):
        check_text(Restored(8, None, {"data": "another", "masks": MASKS}), mixtures, corpus)
    run = SimpleNamespace(path="runs/chat")
    old, other = (SimpleNamespace(run=run, step=8, metadata={"masks": masks}) for masks in (1, MASKS))
    assert f"version {MASKS}, and the checkpoint's is 1." in changed("data.sources", old, corpus)
    assert "the text is not what it was when" in changed("data.sources", other, corpus)


def test_a_trained_bpe_reads_the_messages_and_keeps_the_template(tmp_path):
    rows = [{"messages": [TALK[0], {**TALK[1], "content": "abcabc"}]}] * 40
    config = data(write_lines(tmp_path / "a", rows), tmp_path, tokenizer=BpeConfig(vocabulary=262))
    tokenizer = prepare(config, 8, 0).tokenizer
    assert len(tokenizer.encode("abcabc")) < 3
    again = from_json(json.loads(json.dumps(tokenizer.saved())), "here")
    assert again.chat_template == tokenizer.chat_template
    assert again.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(again.encode("abc"), tokenizer.encode("abc"))
