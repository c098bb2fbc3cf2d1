"""Processes of a run find one another, in threads of this process."""

import re
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from gregale.distributed import rendezvous as module
from gregale.distributed.config import DistributedConfig
from gregale.distributed.liveness import EXIT_CODE, Peer
from gregale.distributed.rendezvous import JoinRequest, wait_for_processes
from gregale.errors import UserError
from tests.ports import free_port
from tests.waiting import until


@pytest.fixture
def port(monkeypatch) -> int:
    """The coordinator's; who waits there is told more often than users are."""
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.05)
    return free_port()


@pytest.fixture
def joining(port):
    """`joining(process, processes, **settings)`: the rendezvous in a thread; a future of the names of its peers."""
    found: list[Peer] = []

    def names(config: DistributedConfig) -> list[str]:
        peers = wait_for_processes(config)
        found.extend(peers)
        return [re.sub(r" \(.*, pid \d+\)", "", peer.name) for peer in peers]

    def start(process: int, processes: int, seconds: float = 20.0, **settings) -> Future[list[str]]:
        config = DistributedConfig(f"127.0.0.1:{port}", processes, process, seconds, **settings)
        return pool.submit(names, config)

    with ThreadPoolExecutor() as pool:
        yield start
    for peer in found:
        peer.connection.close()


@contextmanager
def said(port: int, text: str):
    """A connection to process 0, as soon as it listens, over which a text was sent."""
    found = []

    def connects() -> bool:
        with suppress(ConnectionRefusedError):
            found.append(socket.create_connection(("127.0.0.1", port)))
        return bool(found)

    until(connects)
    with found[0] as connection:
        connection.sendall(text.encode())
        connection.settimeout(30)
        yield connection


@contextmanager
def joined(port: int, number: int | str, processes: int, host: str):
    """A connection to process 0 of a process that has said who it is, and says nothing else."""
    with said(port, "") as connection:
        challenge = heard(connection, "\n").split()[1]
        connection.sendall(f"{JoinRequest(number, processes, 98, host, 'word').line(b'', challenge)}\n".encode())
        yield connection


def heard(connection: socket.socket, word: str) -> str:
    """What process 0 says, up to a word."""
    text = b""
    while word.encode() not in text:
        received = connection.recv(1024)
        assert received, text
        text += received
    return text.decode()


def test_who_is_missing_is_said_while_others_wait_and_at_the_end(joining, port, capfd):
    calls = [joining(process, 4, seconds=1) for process in (0, 2)]
    for call in calls:
        with pytest.raises(SystemExit) as ended:
            call.result(30)
        assert ended.value.code == EXIT_CODE == 75
    lines = capfd.readouterr().err.splitlines()
    late = f"processes 1 and 3 of 4 did not come to 127.0.0.1:{port} within 1 s (distributed.join_seconds)."
    assert lines[-2:] == [f"gregale: error: {late}"] * 2, "both say it"
    waits = re.compile(r"gregale: waiting for processes 1(, 2)? and 3 of 4, \d s so far, 1 s at most")
    assert 3 <= sum(waits.match(line) is not None for line in lines) <= 10


def test_process_0_is_missing(joining, port, capfd):
    with pytest.raises(SystemExit):
        joining(1, 2, seconds=1).result(30)
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"gregale: error: process 0 did not answer at 127.0.0.1:{port} (")
    assert "refused" in last


def test_all_come_and_one_that_was_lost_is_missing_until_it_comes_again(joining, port):
    first = joining(0, 4)
    with joined(port, 2, 4, "here") as waits:
        with joined(port, 1, 4, "there"):
            heard(waits, "missing process 3 of 4\n")
        heard(waits, "missing processes 1 and 3 of 4\n")
        others = [joining(process, 4) for process in (1, 3)]
        assert sorted(first.result(30)) == ["process 1", "process 2", "process 3"]
        assert [other.result(30) for other in others] == [["process 0"]] * 2


def test_a_stranger_is_sent_away(joining, port):
    first = joining(0, 2)
    with said(port, "GET / HTTP/1.1\r\n\r\n") as odd, said(port, "") as silent, said(port, "x" * 2000) as endless:
        assert all(end_of(connection) for connection in (odd, endless))
        for number in ("1" * 5000, 2):  # none that a process has
            with joined(port, number, 2, "there") as stranger:
                assert end_of(stranger)
        assert joining(1, 2).result(30) == ["process 0"]
        assert end_of(silent), "nobody is heard any more"
    assert first.result(30) == ["process 1"]


def end_of(connection: socket.socket) -> bool:
    """Whether process 0 closes a connection, after asking who is there."""
    with suppress(ConnectionResetError):
        while connection.recv(1024):
            pass
    return True


def test_two_that_live_and_have_one_number_are_both_named_and_all_are_told(joining, port):
    first, older, other = (joining(process, 5) for process in (0, 1, 2))
    told = []
    with joined(port, 4, 5, "there") as watcher:
        heard(watcher, "missing process 3 of 5")  # so the others are in, and are told what happens now
        for call in (joining(1, 5), older, first, other):
            with pytest.raises(UserError) as caught:
                call.result(30)
            told.append(str(caught.value))
    here = r"process 1 \([\w.-]+, pid \d+\)"
    wanted = rf"distributed\.process is 1 for two processes, {here} and {here}: each needs a number of its own, .*"
    assert re.fullmatch(wanted, told[0])
    assert set(told) == {told[0]}


def test_one_that_is_gone_without_a_word_is_replaced(joining, port, monkeypatch):
    """As one whose host has lost its power; it was started anew elsewhere."""
    monkeypatch.setattr(module, "_HANDSHAKE_SECONDS", 1.0)
    first = joining(0, 3)
    with joined(port, 1, 3, "dead") as older:
        heard(older, "missing process 2 of 3")
        newer = joining(1, 3)
        heard(older, "there?")
        late = joining(2, 3)
        assert sorted(first.result(30)) == ["process 1", "process 2"]
        assert newer.result(30) == late.result(30) == ["process 0"]


def test_a_second_process_0_is_told_by_the_first(joining, port):
    first, second = joining(0, 2), joining(0, 2)
    for call in (first, second):
        with pytest.raises(UserError, match=r"distributed\.process is 0 for two processes, process 0 .* and process 0"):
            call.result(30)


@pytest.fixture
def token(tmp_path):
    """`token(text)`: the path of a file that has it."""

    def written(text: str) -> str:
        path = tmp_path / text
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return written


def test_who_has_another_secret_is_refused_and_the_others_start(joining, token, capfd):
    ours = token("the secret of this run")
    first = joining(0, 2, token_file=ours)
    for wrong in ({"token_file": token("the secret of another")}, {}):
        with pytest.raises(UserError, match=r"process 1 .* has another secret than process 0, or one of them has none"):
            joining(1, 2, **wrong).result(30)
    assert joining(1, 2, token_file=ours).result(30) == ["process 0"]
    assert first.result(30) == ["process 1"]
    assert "the secret" not in capfd.readouterr().err


def test_who_stands_at_the_coordinator_s_address_without_the_secret_is_not_believed(joining, port, token):
    with socket.create_server(("127.0.0.1", port)) as server:
        call = joining(1, 2, token_file=token("the secret of this run"))
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"challenge 1234\n")
            greeting = heard(connection, "\n").split()
            answer = JoinRequest(1, 2, 3, "x", greeting[5]).answer(b"a guess", "process 0 (elsewhere, pid 1)")
            connection.sendall(f"hello {answer}\n".encode())
            with pytest.raises(UserError, match=r"the program at 127.0.0.1:\d+ has another secret than this process"):
                call.result(30)


def test_another_number_of_processes_is_a_mistake(joining):
    first, wrong = joining(0, 2), joining(1, 3)
    with pytest.raises(UserError, match=r"distributed\.processes 3, and process 0 has 2; give all .* the same"):
        wrong.result(30)
    assert joining(1, 2).result(30) == ["process 0"]
    assert first.result(30) == ["process 1"]


def test_a_port_that_is_taken_is_waited_for_and_one_that_nobody_may_take_is_refused(joining, port, capfd):
    with socket.create_server(("", port)), pytest.raises(SystemExit):
        joining(0, 2, seconds=1).result(30)
    assert f"port {port} of this host, which another program holds" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"cannot listen at port 99999 .*; give a port from 1024 to 65535"):
        wait_for_processes(DistributedConfig("127.0.0.1:99999", 2, 0))
