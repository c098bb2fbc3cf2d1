"""Files are whole or not there, and locks are those of the file that others see."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gregale.atomic_files import (
    LockHeld,
    LockHolder,
    acquire,
    atomic_replace,
    holder_of,
    is_process_dead,
    os_error_text,
    temporary_beside,
    write_bytes,
    write_holder,
)
from tests.disk import largest_file


def test_a_file_or_a_folder_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"before")
    with pytest.raises(BufferError):
        write_bytes(path, memoryview(b"after")[::2])
    with largest_file(3), pytest.raises(OSError, match=f"File too large: '{path}'"):
        write_bytes(path, b"after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path], "nothing half-written takes up room"
    for is_whole in (False, True):
        with suppress(KeyError), atomic_replace(tmp_path / "folder") as folder:
            folder.mkdir()
            (folder / "a").write_bytes(b"")
            if not is_whole:
                raise KeyError
        assert (tmp_path / "folder").exists() == is_whole
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


KILLED = """
import os, sys
from pathlib import Path
from gregale.atomic_files import atomic_replace

with atomic_replace(Path(sys.argv[1]) / "file") as file, atomic_replace(Path(sys.argv[1]) / "folder") as folder:
    file.write_bytes(b"half")
    folder.mkdir()
    (folder / "a").write_bytes(b"half")
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_goes_with_the_next_write_and_nothing_else_does(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    gone, this = killed.stdout.strip(), temporary_beside(Path("elsewhere") / "file").name
    assert len(left := os.listdir(tmp_path)) == 2
    assert all(gone in name for name in left), killed.stderr
    machine = this.split("-")[1]
    stay = [this, f"a.tmp-{machine}-{os.getppid()}-1", f"a.tmp-00000000-{gone}-1", f"a.tmp-{gone}", "tmp-1-2-3"]
    for name in stay:
        (tmp_path / name).write_bytes(b"")
    write_bytes(tmp_path / "other", b"whole")
    assert sorted(os.listdir(tmp_path)) == sorted(["other", *stay])


def test_who_has_ended_is_gone_whether_or_not_somebody_asked_how():
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not is_process_dead(process.pid)
        assert not is_process_dead(os.getpid())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_process_dead(process.pid), "it has a number still"
    assert is_process_dead(process.pid)


def test_a_lock_names_its_holder_and_ends_with_its_file(tmp_path):
    path = tmp_path / "lock"
    with acquire(path) as file:
        with pytest.raises(LockHeld, match="another process"):
            acquire(path)
        write_holder(file)
        with pytest.raises(LockHeld) as caught:
            acquire(path)
        assert caught.value.holder.pid == os.getpid()
    with acquire(path) as file:
        assert holder_of(file).pid == os.getpid(), "who held it last"
        path.rename(tmp_path / "aside")
        with acquire(path) as other:
            assert holder_of(other) is None


def test_a_lock_can_be_held_on_a_full_disk(tmp_path):
    with acquire(tmp_path / "lock") as file, largest_file(0):
        write_holder(file)
        with pytest.raises(LockHeld, match="another process"):
            acquire(tmp_path / "lock")


def test_the_reason_and_the_holder_are_short():
    for error, words in (
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "Read-only file system: a/b"),
        (ValueError('RESOURCE_EXHAUSTED: "x"\n  file 4: No space left on device [28]'), "No space left on device"),
        (ValueError("a\n " + "b" * 300), "a " + "b" * 198),
        (ValueError(), "ValueError"),
        (OSError("process 1 did not write its part"), "process 1 did not write its part"),
    ):
        assert os_error_text(error) == words
    assert str(LockHolder("h", 7, 0.0)).startswith("process 7 on h, since 19")
