import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gregale.data import parts
from gregale.data.build import store_key
from gregale.data.chunk_cache import ChunkCache
from gregale.data.parts import make_tasks, token_dtype
from gregale.data.sources import TextSource, TokensSource
from gregale.data.store import open_store
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from gregale.storage import names, storage_path
from tests.data.conftest import build

BYTES = BytesTokenizer()

# A builder in a process of its own: argv = cache, corpus, what to do at the first report.
BUILDER = """
import os, signal, sys
from pathlib import Path
from gregale.data.build import NamedSource, TokenCache, build_store
from gregale.data.chunk_cache import ChunkCache
from gregale.data.sources import TextSource
from gregale.data.tokenizers import BytesTokenizer
from gregale.storage import storage_path

def report(label, done, total):
    if sys.argv[3] == "die" and done:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    source = NamedSource("x", TextSource(files=(sys.argv[2] + "/*",)))
    cache = TokenCache(storage_path(sys.argv[1]), ChunkCache(Path('none'), 0))
    print(build_store(source, BytesTokenizer(), cache, 2, report).folder)
    assert "jax" not in sys.modules
"""


# A source of two tasks whose reading kills the process; with or without the guard that Python's processes need.
DYING = """
import os, sys
from pathlib import Path
from gregale.data.build import NamedSource, TokenCache, build_store
from gregale.data.chunk_cache import ChunkCache
from gregale.data.progress import silent
from gregale.data.sources import SourceRange, SourceConfig
from gregale.data.tokenizers import BytesTokenizer

class Dying(SourceConfig):
    def parts(self):
        return [SourceRange("x", 0, 1, 1 << 30)] * 2
    def scan(self, part):
        os._exit(1)
    def identity(self):
        return {}

if GUARD:
    cache = TokenCache(Path(sys.argv[1]), ChunkCache(Path('none'), 0))
    build_store(NamedSource("x", Dying()), BytesTokenizer(), cache, 2, silent)
"""


def opened(folder):
    return open_store(storage_path(str(folder)), ChunkCache(Path("nowhere"), 0))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A corpus that makes four tasks, so that it is built by two processes."""
    folder = tmp_path_factory.mktemp("large")
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"file {number} says something\n" * 450_000)
    return folder


@pytest.fixture
def builder(tmp_path):
    script = tmp_path / "builder.py"
    script.write_text(BUILDER)

    def start(cache, corpus, at_report):
        command = [sys.executable, script, cache, corpus, at_report]
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


def test_documents_are_encoded_and_ended_and_empty_ones_left_out(tmp_path, contents):
    for name, text in (("a", "hé"), ("b", ""), ("c", "x")):
        (tmp_path / name).write_text(text)
    reports = []
    store = build(TextSource(files=(f"{tmp_path}/?",)), tmp_path / "cache", report=lambda *told: reports.append(told))
    assert contents(store) == [[104, 0xC3, 0xA9, 256], [120, 256]]
    assert store.manifest["tokenizer"] == BYTES.fingerprint
    assert reports == [("x", 4, 4)]
    store.verify()


def test_a_store_is_reused_until_its_files_change(tmp_path):
    (tmp_path / "a").write_text("one")
    source = TextSource(files=(f"{tmp_path}/a",))
    first = build(source, tmp_path / "cache")
    stamps = {path: path.stat() for path in first.folder.iterdir()}
    assert build(source, tmp_path / "cache").folder == first.folder
    assert {path: path.stat() for path in first.folder.iterdir()} == stamps
    (tmp_path / "a").write_text("other")
    assert build(source, tmp_path / "cache").folder != first.folder


def test_several_processes_write_what_one_writes_and_import_no_jax(tmp_path, large, builder):
    one = build(TextSource(files=(f"{large}/*",)), tmp_path / "one", workers=1)
    output, errors = builder(tmp_path / "two", large, "go on").communicate()
    two = opened(output.decode().strip()) if output else pytest.fail(errors.decode())
    assert one.manifest == two.manifest
    np.testing.assert_array_equal(one.offsets, two.offsets)
    np.testing.assert_array_equal(one.tokens[::1000], two.tokens[::1000])
    two.verify()
    assert {path.name for path in two.folder.iterdir()} == {path.name for path in one.folder.iterdir()}


def test_a_killed_builder_leaves_no_store_and_no_process_and_the_next_goes_on(tmp_path, large, builder):
    cache = tmp_path / "cache"
    killed = builder(cache, large, "die")
    killed.communicate()  # returns when the last process that holds the pipe has ended: the workers too
    assert killed.returncode == -9
    source = TextSource(files=(f"{large}/*",))
    folder = cache / store_key(source, BYTES)
    assert list(folder.glob("*.claim")), "it was at work"
    with pytest.raises(UserError, match=r"manifest\.json: missing"):
        opened(folder)
    told = []
    build(source, cache, report=lambda *report: told.append(report)).verify()
    assert told[0][0] == "x"
    assert told[0][1] >= 4 << 20, "what the killed one had finished is not done again"
    assert all(path.suffix in (".bin", ".json", ".npy") for path in folder.iterdir()), "and nothing else stays"


@pytest.mark.parametrize("at", ["a disk", "a store"])
def test_two_builders_at_once_both_end_with_the_one_store(tmp_path, builder, request, at):
    cache = tmp_path / "cache" if at == "a disk" else request.getfixturevalue("s3")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("some text" * 100_000)
    both = [builder(cache, tmp_path / "corpus", "go on") for _ in range(2)]
    outputs = {process.communicate()[0].decode().strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = outputs
    opened(folder).verify()
    assert not [name for name in names(storage_path(folder)) if name.endswith(".claim")]


@pytest.mark.parametrize("guard", ['__name__ == "__main__"', "True"])
def test_processes_that_die_end_in_a_clear_message(tmp_path, guard):
    script = tmp_path / "dying.py"
    script.write_text(DYING.replace("GUARD", guard))
    run = subprocess.run([sys.executable, script, tmp_path / "cache"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "UserError: A process that encodes text died. Either memory ran out" in run.stderr
    assert not list((tmp_path / "cache").glob("*/*.json"))


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    np.array([1, 0, 2, 3, 257, 4], np.uint16).tofile(tmp_path / "a.bin")
    source = TokensSource(files=(str(tmp_path / "a.bin"),), end_of_document=0)
    with pytest.raises(UserError, match=r"a\.bin, token 4: id 257 is outside the vocabulary, 0 to 256"):
        build(source, tmp_path / "cache")
    np.array([1, -1], np.int32).tofile(tmp_path / "a.bin")
    source = TokensSource(files=(str(tmp_path / "a.bin"),), dtype="int32")
    with pytest.raises(UserError, match=r"a\.bin, token 1: id -1 is outside the vocabulary"):
        build(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*"))


def test_a_source_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="empty: no document with any text in 0 bytes of input"):
        build(TextSource(files=(f"{tmp_path}/a.txt",)), tmp_path / "cache")


def test_a_cache_that_cannot_be_a_folder_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"data\.cache: .*cache cannot be written to"):
        build(TextSource(files=(f"{tmp_path}/a.txt",)), tmp_path / "cache")


def test_the_smallest_type_that_holds_every_id():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32


def test_parts_are_as_large_as_wanted_and_of_a_small_source_there_are_many(tmp_path, monkeypatch):
    for name, value in (("LEAST_TASK_BYTES", 10), ("MANY_TASKS", 4), ("TASK_BYTES", 30)):
        monkeypatch.setattr(parts, name, value)
    source, sizes = TextSource(files=(f"{tmp_path}/*.txt",)), []
    for count in (2, 8, 40):
        for number in range(count):
            (tmp_path / f"{number:02}.txt").write_text("x" * 10)
        sizes.append([task.size_bytes for task in make_tasks(source)])
    assert sizes == [[10, 10], [20] * 4, [30] * 13 + [10]]


def test_a_store_of_bad_documents_alone_says_what_was_wrong(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(
        UserError, match=r"empty: no document with any text .* 1 bad document\(s\) skipped: .*/a, byte 0"
    ):
        build(TextSource(files=(f"{tmp_path}/a",), on_bad_document="skip"), tmp_path / "cache")


def test_what_is_skipped_is_part_of_what_a_store_is(tmp_path):
    stops, skips = (TextSource(files=(f"{tmp_path}/a",), on_bad_document=how) for how in ("stop", "skip"))
    (tmp_path / "a").write_text("x")
    assert store_key(stops, BYTES) != store_key(skips, BYTES)
