import hashlib
import os

import pytest

from gregale.data.store import ChunkCache
from tests.disk import largest_file


def of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def fetched():
    """The contents that had to be fetched."""
    return []


@pytest.fixture
def get(fetched):
    def get(disk, content):
        assert disk.get(of(content), lambda: fetched.append(content) or content) == content

    return get


def test_what_was_fetched_stays_for_later_processes_unless_it_is_damaged(tmp_path, get, fetched):
    for _ in range(2):
        get(ChunkCache(tmp_path, 1000), b"some")
    assert fetched == [b"some"]
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_bytes(b"sume")
    disk = ChunkCache(tmp_path, 1000)
    for _ in range(2):
        get(disk, b"some")
        assert path.read_bytes() == b"some"
    assert fetched == [b"some", b"some"]


def test_what_was_not_read_for_longest_goes(tmp_path, get, fetched):
    disk = ChunkCache(tmp_path, 1000)
    contents = [bytes([number]) * 100 for number in range(9)]
    for age, content in enumerate(contents):
        get(disk, content)
        os.utime(tmp_path / of(content)[:2] / of(content), (1000 + age, 1000 + age))
    get(disk, contents[0])  # it is in use
    for number in range(20, 40):
        get(disk, bytes([number]) * 100)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1000
    fetched.clear()
    for number in range(39, 33, -1):
        get(disk, bytes([number]) * 100)
    assert fetched == []
    get(disk, contents[1])
    assert fetched == [contents[1]]


def test_without_room_everything_is_fetched(tmp_path, get, fetched):
    with largest_file(2):
        for _ in range(2):
            get(ChunkCache(tmp_path / "disk", 1000), b"some")
    (tmp_path / "file").write_text("no folder")
    get(ChunkCache(tmp_path / "file", 1000), b"some")
    assert fetched == [b"some"] * 3
