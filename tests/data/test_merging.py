"""The parts of a store become one file: without room for a second copy, and on from where a killed process stopped."""

from __future__ import annotations

import numpy as np
import pytest

from gregale.data import merging
from gregale.data.assembly import put_together
from gregale.data.build import Cache, NamedSource, build_store, store_key
from gregale.data.disk import Disk
from gregale.data.merging import Merged
from gregale.data.parts import Damaged, encode_part, make_tasks, part_name, read_seal
from gregale.data.progress import silent
from gregale.data.remote_store import parts_of
from gregale.data.sharing import Crew
from gregale.data.sources import TextSource
from gregale.data.store import MANIFEST_NAME, open_store
from gregale.data.tokenizers import BytesTokenizer

BYTES = BytesTokenizer()
PARTS = 6


class Killed(BaseException):
    """As SIGKILL would."""


@pytest.fixture
def source(tmp_path, monkeypatch) -> TextSource:
    """Text in six parts, of which two at a time are merged."""
    (tmp_path / "text").mkdir()
    for number in range(PARTS):
        (tmp_path / "text" / f"{number}.txt").write_text(f"file {number}. " * (2000 + 100 * number))
    monkeypatch.setattr("gregale.data.parts.TASK_BYTES", 1)
    monkeypatch.setattr(merging, "AT_ONCE_BYTES", 60_000)
    return TextSource(files=(str(tmp_path / "text" / "*"),))


@pytest.fixture
def folder(tmp_path, source):
    """Where the store comes; its parts are encoded."""
    folder = tmp_path / "cache" / store_key(source, BYTES)
    parts_of(folder).mkdir(parents=True)
    for task in make_tasks(source):
        encode_part(task, BYTES, parts_of(folder))
    return folder


def size_below(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def put(source, folder, report=silent, removes: bool = True) -> None:
    put_together(make_tasks(source), BYTES, parts_of(folder), folder, removes, report)


def stop_at(wanted: int):
    """A report at which the process is killed when so many parts are merged."""
    seen = []

    def report(label: str, done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == wanted:
            raise Killed

    return report


def test_there_never_is_more_than_the_store_and_a_few_parts(source, folder):
    most, parts = [size_below(folder.parent)], size_below(folder.parent)
    put(source, folder, lambda *_: most.append(size_below(folder.parent)))
    assert max(most) < parts + 90_000 < 1.5 * parts
    assert open_store(folder).manifest["parts"] == [1] * PARTS
    assert size_below(folder) < 1.1 * parts


@pytest.mark.parametrize("at", range(1, PARTS + 1))
def test_who_is_killed_leaves_what_the_next_goes_on_from(source, folder, tmp_path, at):
    whole = build_store(NamedSource("x", source), BYTES, Cache(tmp_path / "other", Disk(tmp_path, 0)), 1, silent)
    with pytest.raises(Killed):
        put(source, folder, stop_at(at))
    merged = Merged.read(parts_of(folder))
    done = merged.parts if merged else 0
    assert done == (at - 1) // 2 * 2
    left = {path.name for path in parts_of(folder).glob("part-*.bin")}
    assert left == {part_name(number) for number in range(done, PARTS)}
    reports: list[int] = []
    put(source, folder, lambda _, done, total: reports.append(done))
    assert len(reports) == PARTS - done
    store = open_store(folder)
    store.verify()
    np.testing.assert_array_equal(store.tokens, whole.tokens)
    assert (folder / MANIFEST_NAME).read_bytes() == (whole.folder / MANIFEST_NAME).read_bytes()


@pytest.mark.parametrize("name", ["whole/tokens.bin", "lengths.bin", "merged.json"])
def test_what_was_merged_and_is_damaged_is_encoded_again(source, folder, tmp_path, name):
    with pytest.raises(Killed):
        put(source, folder, stop_at(5))
    path = parts_of(folder) / name
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged):
        put(source, folder)
    store = build_store(NamedSource("x", source), BYTES, Cache(folder.parent, Disk(tmp_path, 0)), 1, silent)
    store.verify()
    assert bytes(store.tokens[:6].astype(np.uint8)) == b"file 0"
    assert not parts_of(folder).exists()


def test_two_at_once_come_to_the_one_store(source, folder):
    """Each was taken for dead by the other: one merges more whenever the other has merged a part."""
    calls = []

    def report(label: str, done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            put(source, folder, removes=True)

    with pytest.raises(Damaged):  # what it merged into has got its name; `build` finds the store complete
        put(source, folder, report)
    open_store(folder).verify()


def test_parts_that_somebody_reads_stay(source, folder, tmp_path):
    with Crew(parts_of(folder), reads=True):
        store = build_store(NamedSource("x", source), BYTES, Cache(folder.parent, Disk(tmp_path, 0)), 1, silent)
        store.verify()
        assert all((parts_of(folder) / part_name(number)).exists() for number in range(PARTS))
        assert read_seal(parts_of(folder), 0) is not None
