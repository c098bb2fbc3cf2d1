"""A disk, S3 and GCS by the same names; the stores are stand-ins in processes of their own."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.storage import (
    ObjectPath,
    Status,
    create,
    files_below,
    is_url,
    names,
    read_range,
    remove_tree,
    status,
    storage_path,
    upload,
    write_bytes,
)


@pytest.fixture(params=["disk", "s3", "gs"])
def folder(request, tmp_path):
    if request.param == "disk":
        (tmp_path / "disk" / "a").mkdir(parents=True)
        return tmp_path / "disk"
    return request.getfixturevalue(request.param)


def test_a_place_is_written_read_listed_and_deleted(folder, tmp_path):
    assert not (folder / "a" / "none").exists()
    assert status(folder / "a" / "none") is None
    with pytest.raises(FileNotFoundError):
        (folder / "a" / "none").read_bytes()
    file = folder / "a" / "b.bin"
    write_bytes(file, b"0123456789")
    assert file.is_file()
    assert not file.is_dir()
    assert (folder / "a").is_dir()
    assert file.read_bytes() == b"0123456789"
    assert [read_range(file, *ends) for ends in ((2, 5), (8, 99), (3, 3), (10, 12), (50, 60))] == [
        *(b"234", b"89", b"", b"", b"")
    ], "an object that is shorter than it was is damage, and no refusal"
    (tmp_path / "here").write_bytes(b"from a file")
    upload(tmp_path / "here", folder / "c")
    assert (folder / "c").read_bytes() == b"from a file"
    assert {name: found.size for name, found in files_below(folder).items()} == {"a/b.bin": 10, "c": 11}
    assert files_below(folder)["c"] == status(folder / "c")
    assert names(folder) == ["a", "c"]
    assert names(folder / "none") == []
    (folder / "c").unlink()
    (folder / "c").unlink(missing_ok=True)
    assert list(files_below(folder)) == ["a/b.bin"]
    remove_tree(folder)
    assert not folder.exists()
    remove_tree(folder)


def test_the_identity_changes_with_the_content(folder):
    write_bytes(folder / "a" / "x", b"one")
    before = status(folder / "a" / "x")
    assert status(folder / "a" / "x") == before
    write_bytes(folder / "a" / "x", b"two")
    assert isinstance(before, Status)
    assert status(folder / "a" / "x") != before


def test_names_that_begin_alike_are_not_below(folder):
    for name in ("run", "run-2"):
        if not isinstance(folder, ObjectPath):
            (folder / name).mkdir()
        write_bytes(folder / name / "x", b"")
    assert list(files_below(folder / "run")) == ["x"]
    remove_tree(folder / "run")
    assert (folder / "run-2" / "x").is_file()
    assert not (folder / "run").is_dir()


def test_of_several_that_create_one_does(folder):
    contents = [b"%d" % number for number in range(6)]
    with ThreadPoolExecutor(len(contents)) as pool:
        found = dict(zip(contents, pool.map(partial(create, folder / "lock"), contents), strict=True))
    made = [content for content in contents if found[content]]
    assert made == [(folder / "lock").read_bytes()]
    assert not create(folder / "lock", b"late")
    assert made == [(folder / "lock").read_bytes()]


def test_what_a_text_names(tmp_path):
    assert storage_path(str(tmp_path)) == tmp_path
    found = storage_path("gs://bucket//runs/first/")
    assert (str(found), found.name, str(found.parent)) == ("gs://bucket/runs/first", "first", "gs://bucket/runs")
    assert str(found.with_name("second") / "config.yaml") == "gs://bucket/runs/second/config.yaml"
    assert is_url("az://x")
    with pytest.raises(UserError, match=r"az://x: az:// is not a store that is known; these are: s3://bucket/"):
        storage_path("az://x")
    for text, meant in (("s3:/bucket/x", "s3://bucket/x"), ("gs:bucket", "gs://bucket"), ("gcs:/b", "gs://b")):
        with pytest.raises(UserError, match=f"^{text} is neither a URL nor likely a path: {meant} names a store"):
            storage_path(text)
    assert storage_path("./s3:/bucket") == Path("s3:/bucket")
    with pytest.raises(UserError, match="s3:// names no bucket; it has to be like s3://bucket/folder"):
        storage_path("s3://")


def test_nothing_is_imported_before_an_object_is_asked_for():
    program = """
import sys
from gregale.storage import storage_path

storage_path("s3://b/x") / "y"
print(*(name for name in ("jax", "fsspec", "s3fs", "numpy") if name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"s3://b/x needs the package s3fs, .* Run `.* '\.\[s3\]'`"):
        storage_path("s3://b/x").read_bytes()


def test_a_file_that_goes_while_a_folder_is_looked_at_is_left_out(tmp_path, monkeypatch):
    """Another process's temporary name: it was there when names were read, and is not when sizes are."""
    for name in ("kept", "gone"):
        (tmp_path / name).write_bytes(b"x")
    is_file = Path.is_file

    def goes(path: Path) -> bool:
        found = is_file(path)
        if path.name == "gone":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", goes)
    assert list(files_below(tmp_path)) == ["kept"]
