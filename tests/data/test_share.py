"""Several builders of one store: they share its parts, take over those of who is lost, and do nothing twice."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from threading import Thread

import numpy as np
import pytest

from gregale.data import build as building
from gregale.data import parts
from gregale.data.build import Cache, NamedSource, Overtaken, build_store, sharing, store_key
from gregale.data.disk import Disk
from gregale.data.parts import discard, make_tasks, read_part, read_seal
from gregale.data.progress import silent
from gregale.data.sharing import Crew, Note
from gregale.data.sources import TextSource
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from gregale.files import machine
from gregale.storage import write_bytes
from tests.disk import largest_file

FILES = 12
BYTES = BytesTokenizer()
READ: list[str] = []  # files, as they are read
FAILING: set[str] = set()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of as many tasks as files, which takes a while to read, and can be told to fail."""
    scan = TextSource.scan

    def watched(self, part):
        READ.append(part.path)
        time.sleep(0.02)
        if part.path in FAILING:
            raise UserError(f"{part.path}: not now")
        yield from scan(self, part)

    monkeypatch.setattr(TextSource, "scan", watched)
    monkeypatch.setattr(parts, "TASK_BYTES", 1)
    READ.clear()
    FAILING.clear()
    (tmp_path / "text").mkdir()
    for number in range(FILES):
        (tmp_path / "text" / f"{number:02}.txt").write_text(f"file {number} " * (number + 1))
    source = TextSource(files=(f"{tmp_path}/text/*.txt",))
    assert len(make_tasks(source)) == FILES
    return source


def build(source, cache, report=silent):
    return build_store(NamedSource("x", source), BYTES, Cache(cache, Disk(cache / "pieces", 10**9)), 1, report)


def same(one, two) -> bool:
    return one.manifest["files"] == two.manifest["files"] and np.array_equal(one.tokens, two.tokens)


@pytest.fixture
def whole(source, tmp_path, monkeypatch):
    """The store that one process makes of one part."""
    with monkeypatch.context() as patch:
        patch.setattr(parts, "TASK_BYTES", 1 << 20)
        store = build(source, tmp_path / "whole")
    READ.clear()
    return store


def names(read):
    return sorted(os.path.basename(path) for path in read)


def test_two_builders_share_the_parts_and_make_what_one_makes(source, whole, tmp_path):
    made = []
    threads = [Thread(target=lambda: made.append(build(source, tmp_path / "cache"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert all(same(store, whole) for store in made)
    assert len(READ) < 1.5 * FILES, "a race may have done a part twice, no more"
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [whole.folder.name]


def test_what_is_finished_is_not_done_again(source, whole, tmp_path):
    FAILING.add(str(tmp_path / "text" / "07.txt"))
    with pytest.raises(UserError, match=r"07\.txt: not now"):
        build(source, tmp_path / "cache")
    READ.clear()
    FAILING.clear()
    told = []
    assert same(build(source, tmp_path / "cache", lambda *report: told.append(report)), whole)
    assert names(READ) == [f"{number:02}.txt" for number in range(7, FILES)]
    total = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    assert told[0][0] == "x"
    assert 0 < told[0][1] < total, "what was there is said first"
    assert (("x", total, total)) in told


def test_who_comes_when_the_store_is_just_complete_takes_it(source, whole, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / whole.folder.name

    def completed(parts, **options):
        """Another process completes the store, and removes the parts, before this one is seen."""
        if not folder.exists():
            shutil.copytree(whole.folder, folder)
        shutil.rmtree(parts)
        return Crew(parts, **options)

    monkeypatch.setattr(building, "Crew", completed)
    assert same(build(source, tmp_path / "cache"), whole)
    assert READ == []
    with (
        pytest.raises(Overtaken, match="another process has completed the token store of x at this very moment"),
        sharing(NamedSource("x", source), BYTES, folder, 1, silent, reads=True),
    ):
        pass


@pytest.mark.parametrize("name", ["part-00000002.bin", "part-00000002.json"])
@pytest.mark.parametrize("damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], None])
def test_a_damaged_part_is_done_anew(source, whole, tmp_path, name, damage):
    FAILING.add(str(tmp_path / "text" / "04.txt"))
    with pytest.raises(UserError):
        build(source, tmp_path / "cache")
    path = tmp_path / "cache" / f"{store_key(source, BYTES)}.parts" / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    READ.clear()
    FAILING.clear()
    assert same(build(source, tmp_path / "cache"), whole)
    assert names(READ) == sorted(["02.txt", *(f"{number:02}.txt" for number in range(4, FILES))])


def test_a_full_disk_is_said_and_what_was_finished_stays(source, whole, tmp_path):
    with largest_file(90), pytest.raises(UserError, match=r"cache: the token store could not be written .*File too l"):
        build(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.parts/*.tmp-*")), "nothing half-written takes up room"
    assert same(build(source, tmp_path / "cache"), whole)


def note_of(crew: Crew, **fields) -> Note:
    note = Note("other", "elsewhere", "another machine", 1, holds=(0,), done_bytes=10)
    note = replace(note, **fields)
    write_bytes(crew.place.with_name("other.json"), json.dumps(asdict(note)).encode())
    return note


def test_a_silent_builder_is_lost_after_a_while_and_one_that_lives_is_not(tmp_path):
    with Crew(tmp_path, beat_seconds=10, lost_seconds=0.2) as crew:
        note = note_of(crew)
        assert [each.builder for each in crew.look()] == ["other"]
        assert crew.claim(range(3), 2) == [1, 2]
        time.sleep(0.25)
        note_of(crew, beat=note.beat + 1)
        assert crew.look(), "it has given a sign of life"
        time.sleep(0.25)
        assert not crew.look()
        assert crew.claim(range(3), 2) == [0]


def test_a_process_that_is_gone_from_this_host_is_lost_at_once(tmp_path):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with Crew(tmp_path) as crew:
        note_of(crew, space=machine(), pid=int(gone.stdout))
        assert not crew.look()
        note_of(crew, space=machine(), pid=os.getppid())
        assert [crew.is_parent(each) for each in crew.look()] == [True]
        assert crew.neighbours() == 1
    assert not list((tmp_path / "builders").glob(f"{crew.place.name}")), "who leaves takes its note with it"


def test_of_two_that_take_the_same_part_one_yields(tmp_path):
    with Crew(tmp_path) as one, Crew(tmp_path) as two:
        assert one.claim(range(2), 1) == [0]
        two._others = []  # it looked before
        one_is_first = one._note.builder < two._note.builder
        assert two.claim([0], 1) == ([] if one_is_first else [0])
        assert two._note.holds == (() if one_is_first else (0,))


def test_progress_says_what_other_hosts_have_done(source, tmp_path):
    folder = tmp_path / "cache" / f"{store_key(source, BYTES)}.parts"
    told = []
    with Crew(folder) as crew:
        note_of(crew, holds=(FILES + 7,), done_bytes=77)
        build(source, tmp_path / "cache", lambda *report: told.append(report))
        crew.place.with_name("other.json").unlink()
    assert {label for label, *_ in told} == {"x", "x on elsewhere", "putting together"}
    assert ("x on elsewhere", 77) in {report[:2] for report in told}


def test_documents_are_encoded_in_groups_and_come_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_SIZE", 10)
    documents = ["one", "", "two and more", "3", "", "4"]
    (tmp_path / "a.txt").write_text("<e>".join(documents))
    (task,) = make_tasks(TextSource(files=(f"{tmp_path}/a.txt",), separator="<e>"))
    with open(tmp_path / "part", "w+b") as file:
        seal = parts.write_part(task, BYTES, file)
        tokens = np.fromfile(tmp_path / "part", "<u2", seal.tokens)
    assert tokens.tolist() == [token for each in documents if each for token in [*each.encode(), 256]]
    assert seal.documents == 4


def test_a_part_is_read_in_blocks(source, tmp_path, monkeypatch):
    (task,) = make_tasks(TextSource(files=(f"{tmp_path}/text/11.txt",)))
    monkeypatch.setattr(parts, "PIECE_BYTES", 16)
    monkeypatch.setattr(parts, "PIECES_AT_ONCE", 3)
    parts.encode_part(task, BYTES, tmp_path)
    seal = read_seal(tmp_path, 0)
    blocks = list(read_part(tmp_path, 0, seal))
    assert set(map(len, blocks[:-1])) == {48}
    data = (tmp_path / "text" / "11.txt").read_bytes()
    assert np.frombuffer(b"".join(blocks)[:-8], "<u2").tolist() == [*data, 256]
    discard(tmp_path, 0)
    assert read_seal(tmp_path, 0) is None
