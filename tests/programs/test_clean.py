"""`gregale clean`: what it lists, what it deletes, and what it never touches."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from gregale.cli import main
from gregale.data.cache import entries
from gregale.data.config import DataConfig, build_stores
from gregale.data.sharing import Crew
from gregale.data.sources import TextSource
from gregale.data.store import read_manifest
from gregale.data.tokenizers import BpeConfig
from gregale.services.compiled import processor

KEY = "0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache with two stores, one of them of a file that has changed since, and a trained tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("old", "new"):
        Path(f"{name}.txt").write_text("the wind and the sea " * 40)
        sources = {name: TextSource(files=(f"{name}.txt",))}
        build_stores(DataConfig(sources=sources, held_out=0.5, workers=1))
    two = {name: TextSource(files=(f"{name}.txt",)) for name in ("old", "new")}
    Path("more.txt").write_text("the gale " * 40)
    two["more"] = TextSource(files=("m*.txt", "new.txt"))
    build_stores(DataConfig(sources=two, held_out=0.5, workers=1, tokenizer=BpeConfig(257)))
    Path("old.txt").write_text("another text")
    return tmp_path / "cache"


def leftover(cache: Path, host: str, age_seconds: float) -> Path:
    folder = cache / f".{KEY}.{host}.abcd1234"
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(b"x" * 1000)
    os.utime(folder / "tokens.bin", (time.time() - age_seconds,) * 2)
    return folder


def test_compiled_programs_go_too(tmp_path, capsys):
    folder = tmp_path / f"compiled-{processor()}"
    folder.mkdir()
    (folder / "jit_make-0-cache").write_bytes(b"x" * 1000)
    assert main(["clean", str(tmp_path), "--stale"]) == 0
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    out = capsys.readouterr().out
    assert "compiled programs" in out
    assert "1.0 kB freed" in out
    assert not folder.exists()


def kinds(cache: Path) -> list[str]:
    return sorted(entry.kind for entry in entries(cache))


def test_without_a_terminal_it_lists_and_deletes_nothing(cache, capsys):
    before = kinds(cache)
    assert before == ["token store"] * 5 + ["tokenizer"]
    assert main(["clean"]) == 0
    out = capsys.readouterr().out
    assert f"text, {cache.parent}/new.txt" in out
    assert f"text, {cache.parent}/more.txt and 1 more" in out
    assert out.count("old.txt; 1 of them changed or gone") == 2
    assert out.count("today") == 6
    assert "6 folder(s)" in out
    assert "--yes" in out
    assert kinds(cache) == before


def test_yes_deletes_all_of_it_and_it_is_built_again(cache, capsys):
    (cache / "mine.txt").write_text("a file of the user")
    (cache / "notes").mkdir()
    leftover(cache, socket.gethostname(), 0)
    assert main(["clean", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("freed.\n")
    assert {path.name for path in cache.iterdir()} == {"mine.txt", "notes"}
    (cache / "mine.txt").unlink()
    (cache / "notes").rmdir()
    assert main(["clean", "--yes"]) == 0
    assert "nothing to clean" in capsys.readouterr().out
    build_stores(DataConfig(sources={"new": TextSource(files=("new.txt",))}, held_out=0.5, workers=1))
    assert kinds(cache) == ["token store"]


def test_stale_keeps_what_a_run_can_use(cache):
    damaged = next(entry.folder for entry in entries(cache) if "more.txt" in entry.origin)
    (damaged / "manifest.json").write_text("{}")
    leftover(cache, socket.gethostname(), 0)
    assert main(["clean", str(cache), "--stale", "--yes"]) == 0
    assert kinds(cache) == ["token store"] * 2 + ["tokenizer"]
    assert not any(entry.is_stale for entry in entries(cache))


@pytest.mark.parametrize(
    ("answer", "deletes"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_it_asks(cache, monkeypatch, capsys, answer, deletes):
    master, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        os.write(master, answer.encode() or b"\x04")  # the end of a terminal's input
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["clean"]) == 0
    os.close(master)
    assert "Delete 6 folder(s)" in capsys.readouterr().out
    assert (list(cache.iterdir()) == []) == deletes


def test_what_a_build_holds_is_kept(cache, capsys):
    held = entries(cache)[0]
    with open(held.lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["clean", "--yes"]) == 0
    assert f"{held.folder.name}: kept, a build may be at work on it." in capsys.readouterr().out
    assert [entry.folder for entry in entries(cache)] == [held.folder]


@pytest.mark.parametrize(("host", "age_seconds", "goes"), [("elsewhere", 60, False), ("elsewhere", 2e5, True)])
def test_what_another_host_may_be_building_is_kept_for_a_day(cache, host, age_seconds, goes):
    folder = leftover(cache, host, age_seconds)
    assert main(["clean", "--yes"]) == 0
    assert folder.exists() != goes


def test_parts_of_an_unfinished_store_are_kept_while_somebody_builds_it(cache, capsys):
    stores = [entry for entry in entries(cache) if "new.txt" in entry.origin and "old" not in entry.origin]
    parts = cache / f"{KEY}.parts"
    parts.mkdir()
    source = read_manifest(stores[0].folder / "manifest.json")["source"]
    (parts / "source.json").write_text(json.dumps({"source": source}))
    (found,) = (entry for entry in entries(cache) if entry.kind == "parts of a store")
    assert "text, " in found.origin
    assert not found.is_stale
    with Crew(parts):  # of this process, which lives
        assert main(["clean", "--yes"]) == 0
        assert f"{parts.name}: kept, a build may be at work on it" in capsys.readouterr().out
    assert main(["clean", "--yes"]) == 0
    assert not parts.exists()


def test_a_store_of_objects_is_not_cleaned(capsys):
    assert main(["clean", "s3://bucket/cache"]) == 2
    assert "s3://bucket/cache: only folders are cleaned" in capsys.readouterr().err


def test_links_are_neither_followed_nor_deleted(cache, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    (cache / KEY).symlink_to(outside)
    inside = entries(cache)[0].folder / "link"
    inside.symlink_to(outside)
    assert main(["clean", "--yes"]) == 0
    assert (cache / KEY).is_symlink()
    assert (outside / "manifest.json").exists()


@pytest.mark.parametrize("name", ["nowhere", ".", "file.txt", "n" * 300])
def test_what_is_no_cache_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("a text")
    Path("folder").mkdir()
    assert main(["clean", name, "--yes"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no cache" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may delete anything")
def test_what_cannot_be_deleted_is_said(cache, capsys):
    cache.chmod(0o555)
    assert main(["clean", "--yes"]) == 1
    cache.chmod(0o755)
    assert "could not be deleted (Permission denied)" in capsys.readouterr().err
