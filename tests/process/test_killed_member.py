"""A group of islands' hosts in real processes, one of which is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time

MEMBER = """
import json, sys, time
import numpy as np
from gregale.islands.engine.group import Group, GroupFailed
from gregale.islands.engine.server import Server

def say(*words):
    print(*words, flush=True)

def meet():
    key, rank, hosts = json.loads(sys.stdin.readline())
    return Group.build(key, rank, hosts, server, 20.0)

server = Server("127.0.0.1", b"a token of the fleet", dict)
say(server.address)
group = meet()
# A chain: only one of the others has to do with the one that dies, and large messages are under way.
large = np.zeros(50_000_000, np.uint8)
works = [group.receive((group.rank + 1) % group.size, large), group.send((group.rank + 2) % group.size, large, 1)]
say("ready")
try:
    for work in works:
        work.wait(30.0)
except GroupFailed as failed:
    say(time.time(), failed)
group.drop()
group = meet()
arrived = np.zeros(4, np.uint8)
works = [group.receive(1 - group.rank, arrived), group.send(1 - group.rank, np.full(4, 7, np.uint8))]
for work in works:
    work.wait(10.0)
say(arrived.tolist())
"""


def test_all_survivors_know_at_once_and_build_a_new_group():
    members = [
        subprocess.Popen([sys.executable, "-c", MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        hosts = [heard(member) for member in members]
        for rank, member in enumerate(members):
            tell(member, ["first", rank, hosts])
        assert [heard(member) for member in members] == ["ready"] * 4
        begin = time.time()
        members[3].kill()
        survivors = members[:3]
        for member in survivors:
            moment, _, reason = heard(member).partition(" ")
            assert float(moment) - begin < 10.0, reason
        # Another one goes before the next group is there.
        members[2].kill()
        for rank, member in enumerate(members[:2]):
            tell(member, ["second", rank, hosts[:2]])
        assert [heard(member) for member in members[:2]] == ["[7, 7, 7, 7]"] * 2
        assert [member.wait(20) for member in members[:2]] == [0, 0]
    finally:
        for member in members:
            member.kill()
            member.communicate()


def heard(member: subprocess.Popen) -> str:
    assert member.stdout is not None
    return member.stdout.readline().strip()


def tell(member: subprocess.Popen, what: list) -> None:
    assert member.stdin is not None
    member.stdin.write(json.dumps(what) + "\n")
    member.stdin.flush()
