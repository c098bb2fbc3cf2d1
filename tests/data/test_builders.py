"""Several builders of one store: they share its parts, replace a lost builder, and encode no finished part again."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from gregale.data import build as building
from gregale.data import store as parts
from gregale.data.build import Build, NamedSource, identity_of, store_key
from gregale.data.sources import TextSource
from gregale.data.store import discard, make_tasks, read_part, read_part_manifest
from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from tests.data.conftest import build
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
        time.sleep(0.002)
        if part.path in FAILING:
            raise UserError(f"{part.path}: not now")
        yield from scan(self, part)

    monkeypatch.setattr(TextSource, "scan", watched)
    monkeypatch.setattr(parts, "TASK_BYTES", 1)
    in_order = SimpleNamespace(shuffle=list.reverse)  # the last one is taken first
    monkeypatch.setattr(building.random, "SystemRandom", lambda: in_order)
    monkeypatch.setattr(building, "LOST_SECONDS", 0.2)
    monkeypatch.setattr(building, "POLL_SECONDS", 0.01)
    READ.clear()
    FAILING.clear()
    (tmp_path / "text").mkdir()
    for number in range(FILES):
        (tmp_path / "text" / f"{number:02}.txt").write_text(f"file {number} " * (number + 1))
    source = TextSource(files=(f"{tmp_path}/text/*.txt",))
    assert len(make_tasks(source)) == FILES
    return source


def same(one, two) -> bool:
    return one.manifest["files"] == two.manifest["files"] and np.array_equal(one.tokens[:], two.tokens[:])


@pytest.fixture
def whole(source, tmp_path, monkeypatch):
    """The store that one process makes of one part."""
    with monkeypatch.context() as patch:
        patch.setattr(parts, "TASK_BYTES", 1 << 20)
        assert len(make_tasks(source)) == 1
        store = build(source, tmp_path / "whole")
    READ.clear()
    return store


def build_as_two_hosts(source, cache, report):
    """Builds a store in two threads, each of which is on a machine of its own."""

    def on_host(name: str):
        builder = Build(NamedSource("x", source), BYTES, cache / store_key(identity_of(source, BYTES)), 1, report)
        builder.host = name
        builder()
        return build(source, cache)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(on_host, ("one", "two")))


def names(read):
    return sorted(os.path.basename(path) for path in read)


def test_what_is_finished_is_not_done_again_unless_it_is_damaged(source, whole, tmp_path):
    FAILING.add(str(tmp_path / "text" / "09.txt"))
    with pytest.raises(UserError, match=r"09\.txt: not now"):
        build(source, tmp_path / "cache")
    damages = (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], lambda data: b"", None)
    for number, (ending, damage) in enumerate(product(("bin", "json"), damages)):
        path = tmp_path / "cache" / store_key(identity_of(source, BYTES)) / f"part-{number:08}.{ending}"
        path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    READ.clear()
    FAILING.clear()
    told = []
    assert same(build(source, tmp_path / "cache", lambda *report: told.append(report)), whole)
    assert names(READ) == [f"{number:02}.txt" for number in range(FILES) if number != 8]
    total = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    assert told[0][0] == "x"
    assert 0 < told[0][1] < total, "what was there is said first"
    assert ("x", total, total) in told


def test_a_full_disk_is_said_and_what_was_finished_stays(source, whole, tmp_path):
    with largest_file(90), pytest.raises(UserError, match=r"data\.cache: .*cache cannot be written to \(File too l"):
        build(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*.tmp-*")), "nothing half-written takes up room"
    assert same(build(source, tmp_path / "cache"), whole)


def test_hosts_build_together_and_one_that_is_killed_stops_no_other(source, whole, tmp_path):
    """Another host leaves its claims and some of its parts, in no order; then two hosts build."""
    folder = tmp_path / "cache" / store_key(identity_of(source, BYTES))
    folder.mkdir(parents=True)
    for number in (7, 2, 5):
        parts.encode_part(make_tasks(source)[number], BYTES, folder)
    for name in ("encoding-00000000.claim", "completing.claim"):
        (folder / name).write_text(json.dumps({"machine": "elsewhere", "pid": 1, "token": "x", "beat": 3}))
    READ.clear()
    told = []
    made = build_as_two_hosts(source, tmp_path / "cache", lambda *report: told.append(report))
    assert [same(store, whole) for store in made] == [True, True]
    assert names(set(READ)) == [f"{number:02}.txt" for number in range(FILES) if number not in (7, 2, 5)]
    total = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    assert ("x", total, total) in told
    assert 0 < told[0][1] < total, "what other hosts have done counts"


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
    monkeypatch.setattr(parts, "CHUNK_BYTES", 16)
    monkeypatch.setattr(parts, "CHUNKS_AT_ONCE", 3)
    parts.encode_part(task, BYTES, tmp_path)
    seal = read_part_manifest(tmp_path, 0)
    blocks = list(read_part(tmp_path, 0, seal))
    assert set(map(len, blocks[:-1])) == {48}
    data = (tmp_path / "text" / "11.txt").read_bytes()
    assert np.frombuffer(b"".join(blocks)[:-8], "<u2").tolist() == [*data, 256]
    discard(tmp_path, 0)
    assert read_part_manifest(tmp_path, 0) is None
