"""A disk, S3 and GCS by the same names; the stores are stand-ins in processes of their own."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.storage import (
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
from tests.stores import make


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


def test_the_identity_changes_with_the_content_and_names_that_begin_alike_are_not_below(folder):
    for name in ("run", "run-2"):
        (folder / name).mkdir()
        write_bytes(folder / name / "x", b"one")
    before = status(folder / "run" / "x")
    assert isinstance(before, Status)
    assert status(folder / "run" / "x") == before
    write_bytes(folder / "run" / "x", b"two")
    assert status(folder / "run" / "x") != before
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


def test_a_file_system_without_links_creates_once_too(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert create(tmp_path / "lock", b"one")
    assert not create(tmp_path / "lock", b"two")
    assert (tmp_path / "lock").read_bytes() == b"one"
    assert names(tmp_path) == ["lock"]


def test_what_a_text_names(tmp_path):
    assert storage_path(str(tmp_path)) == tmp_path
    found = storage_path("gs://bucket//runs/first/")
    assert (str(found), found.name, str(found.parent)) == ("gs://bucket/runs/first", "first", "gs://bucket/runs")
    assert str(found.with_name("second") / "config.yaml") == "gs://bucket/runs/second/config.yaml"
    assert is_url("ftp://x")
    with pytest.raises(UserError, match=r"ftp://x: ftp:// is not a store that is known; these are: s3://bucket/"):
        storage_path("ftp://x")
    wrong = ("s3:/bucket/x", "s3://bucket/x"), ("gs:bucket", "gs://bucket"), ("gcs:/b", "gs://b"), ("az:/b", "az://b")
    for text, meant in wrong:
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
print(*(name for name in ("jax", "obstore", "boto3", "numpy") if name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for url, extra in (("s3://b/x", "s3"), ("gs://b/x", "gcs"), ("az://b/x", "azure")):
        with pytest.raises(UserError, match=rf"{url} needs the package obstore, .* Run `.* '\.\[{extra}\]'`"):
            storage_path(url).read_bytes()


def test_objects_that_stand_for_folders_are_left_out(s3, s3_endpoint):
    for name in ("", "made/"):
        assert files_below(s3) == {}
        make(s3_endpoint, f"{str(s3).removeprefix('s3://')}/{name}")
    (s3 / "made" / "x").write_bytes(b"content")
    assert list(files_below(s3)) == ["made/x"]
    assert names(s3) == ["made"]


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
    (tmp_path / "gone").write_bytes(b"x")
    assert status(tmp_path / "gone") is None
