"""One builder of a store: what it writes, what it refuses, and what stays when its processes die."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gregale.data import store as parts
from gregale.data.build import identity_of, store_key
from gregale.data.chat.template import ChatTemplate
from gregale.data.sources import TextSource, TokensSource
from gregale.data.sources.chat import ChatSource
from gregale.data.store import ChunkCache, make_tasks, open_store, token_dtype
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from gregale.storage import names, storage_path
from tests.data.conftest import build

BYTES = BytesTokenizer()
LEAST_TASK_BYTES = 10_000

# A builder in a process of its own: argv = cache, corpus, what to do at the first report.
BUILDER = f"""
import os, signal, sys
from pathlib import Path
from gregale.data import store as parts
from gregale.data.build import NamedSource, TokenCache, build_store
from gregale.data.store import ChunkCache
from gregale.data.sources import TextSource
from gregale.data.tokenizers import BytesTokenizer
from gregale.storage import storage_path

def report(label, done, total):
    if sys.argv[3] == "die" and done:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__" or sys.argv[3] == "unguarded":
    if sys.argv[3] != "one part":
        parts.LEAST_TASK_BYTES = {LEAST_TASK_BYTES}
    cache = TokenCache(storage_path(sys.argv[1]), ChunkCache(Path('none'), 0))
    source = NamedSource("x", TextSource(files=(sys.argv[2] + "/*",)))
    print(build_store(source, BytesTokenizer(), cache, 2, report).folder)
    assert "jax" not in sys.modules
"""


def opened(folder):
    return open_store(storage_path(str(folder)), ChunkCache(Path("nowhere"), 0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files that make four tasks, so that two processes build their store."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"file {number} says something\n" * (LEAST_TASK_BYTES // 20))
    return folder


@pytest.fixture
def builder(tmp_path, corpus):
    script = tmp_path / "builder.py"
    script.write_text(BUILDER)

    def start(cache, at_report):
        command = list(map(str, [sys.executable, script, cache, corpus, at_report]))
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_documents_are_encoded_and_ended_and_a_store_is_reused_until_its_files_change(tmp_path, contents):
    for name, text in (("a", "hé"), ("b", ""), ("c", "x")):
        (tmp_path / name).write_text(text)
    source, reports = TextSource(files=(f"{tmp_path}/?",)), []
    store = build(source, tmp_path / "cache", report=lambda *told: reports.append(told))
    assert contents(store) == [[104, 0xC3, 0xA9, 256], [120, 256]], "an empty document is left out"
    assert store.manifest["tokenizer"] == BYTES.fingerprint
    assert reports == [("x", 4, 4)]
    store.verify()
    stamps = {path: path.stat() for path in store.folder.iterdir()}
    assert build(source, tmp_path / "cache").folder == store.folder
    assert {path: path.stat() for path in store.folder.iterdir()} == stamps
    (tmp_path / "a").write_text("other")
    assert build(source, tmp_path / "cache").folder != store.folder
    skips = TextSource(files=source.files, on_bad_document="skip")
    assert store_key(identity_of(skips, BYTES)) != store_key(identity_of(source, BYTES))


def test_a_store_under_the_name_of_another_is_refused_and_its_parts_are_encoded_anew(tmp_path, contents):
    for name, text in (("a", "of a, longer"), ("b", "b")):
        (tmp_path / name).write_text(text)
    a, b = (TextSource(files=(f"{tmp_path}/{name}",)) for name in "ab")
    copied, folder = (
        Path(str(build(a, tmp_path / "cache").folder)),
        tmp_path / "cache" / store_key(identity_of(b, BYTES)),
    )
    shutil.copytree(copied, folder)
    with pytest.raises(UserError, match=f"{folder} has tokens of another source or tokenizer than its name"):
        build(b, tmp_path / "cache")
    (folder / "manifest.json").unlink()
    assert contents(build(b, tmp_path / "cache")) == [[98, 256]], "and not the parts of the other"
    shutil.copytree(tmp_path / "cache", tmp_path / "elsewhere")
    assert contents(build(b, tmp_path / "elsewhere")) == [[98, 256]], "a whole cache may be copied"
    tokenizer = BytesTokenizer()
    tokenizer.chat_template = ChatTemplate("{{ messages }}")
    assert "chat_template" in identity_of(ChatSource(files=(f"{tmp_path}/a",)), tokenizer)


def test_a_killed_builder_leaves_no_store_and_no_process_and_the_next_writes_what_one_process_writes(
    tmp_path, corpus, builder, monkeypatch
):
    monkeypatch.setattr(parts, "LEAST_TASK_BYTES", LEAST_TASK_BYTES)
    cache, source = tmp_path / "cache", TextSource(files=(f"{corpus}/*",))
    assert len(make_tasks(source)) == 4
    killed = builder(cache, "die")
    killed.communicate()  # returns when the last process that holds the pipe has ended: the workers too
    assert killed.returncode == -9
    folder = cache / store_key(identity_of(source, BYTES))
    assert list(folder.glob("*.claim")), "it was at work"
    with pytest.raises(UserError, match=r"manifest\.json: missing"):
        opened(folder)
    told = []
    two = build(source, cache, report=lambda *report: told.append(report), workers=2)
    assert told[0][0] == "x"
    assert told[0][1] >= LEAST_TASK_BYTES, "what the killed one had finished is not done again"
    assert all(path.suffix in (".bin", ".json", ".npy") for path in folder.iterdir()), "and nothing else stays"
    one = build(source, tmp_path / "one", workers=1)
    assert one.manifest == two.manifest
    np.testing.assert_array_equal(one.offsets, two.offsets)
    np.testing.assert_array_equal(one.tokens[:], two.tokens[:])
    two.verify()


def test_two_builders_at_once_both_end_with_the_one_store_and_import_no_jax(builder, s3):
    both = [builder(s3, "one part") for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    (folder,) = {output.strip() for output, _ in outputs}
    opened(folder).verify()
    assert not [name for name in names(storage_path(folder)) if name.endswith(".claim")]


def test_processes_that_die_end_in_a_clear_message(tmp_path, builder):
    run = builder(tmp_path / "cache", "unguarded")
    _, errors = run.communicate()
    assert run.returncode == 1
    assert "UserError: A process that encodes text died. Either memory ran out" in errors
    assert not list((tmp_path / "cache").glob("*/*.json"))


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    for ids, dtype, end, message in (
        ([1, 0, 2, 3, 257, 4], "uint16", 0, "token 4: id 257 is outside the vocabulary, 0 to 256"),
        ([1, -1], "int32", None, "token 1: id -1 is outside the vocabulary"),
    ):
        np.array(ids, dtype).tofile(tmp_path / "a.bin")
        source = TokensSource(files=(str(tmp_path / "a.bin"),), dtype=dtype, end_of_document=end)
        with pytest.raises(UserError, match=rf"a\.bin, {message}"):
            build(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*"))
    assert [token_dtype(size) for size in (65536, 65537)] == [np.uint16, np.uint32]


def test_a_source_without_text_and_a_cache_that_is_no_folder_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "bad").write_bytes(b"\xff")
    (tmp_path / "file").write_text("a file")
    for name, cache, message in (
        ("a.txt", "cache", "empty: no document with any text in 0 bytes of input"),
        ("bad", "cache", r"empty: no document with any text .* 1 bad document\(s\) skipped: .*/bad, byte 0"),
        ("file", "file", r"data\.cache: .*file cannot be written to"),
    ):
        with pytest.raises(UserError, match=message):
            build(TextSource(files=(f"{tmp_path}/{name}",), on_bad_document="skip"), tmp_path / cache)


def test_parts_are_as_large_as_wanted_and_of_a_small_source_there_are_many(tmp_path, monkeypatch):
    for name, value in (("LEAST_TASK_BYTES", 10), ("MANY_TASKS", 4), ("TASK_BYTES", 30)):
        monkeypatch.setattr(parts, name, value)
    source, sizes = TextSource(files=(f"{tmp_path}/*.txt",)), []
    for count in (2, 8, 40):
        for number in range(count):
            (tmp_path / f"{number:02}.txt").write_text("x" * 10)
        sizes.append([task.size_bytes for task in make_tasks(source)])
    assert sizes == [[10, 10], [20] * 4, [30] * 13 + [10]]
