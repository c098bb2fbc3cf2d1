"""The outer side of an island on disk: what is read is what was written, and damage is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.islands import files
from gregale.islands.protocol.headers import Generation, Outer
from gregale.islands.protocol.ledger import Ledger, Lot, Report, advance
from gregale.methods.island_outer import Held

LEDGER = advance(Ledger(), [Report("a", "s", 3)], Lot(8, 4))
OUTER = Outer(Generation(2, "name"), 7, "digest", "key", 3, LEDGER)
LEAVES = {
    "0/theta/w|0,1": Held(np.arange(12, dtype=np.float32).reshape(3, 4), 7),
    "0/optimizer/count": Held(np.array(5, np.int32), 7),
    "1/theta/nothing|": Held(np.zeros((0, 2), np.float32), 4),
}


def test_it_comes_back(tmp_path):
    files.write(tmp_path, OUTER, LEAVES)
    saved = files.read(tmp_path, 7)
    assert saved.outer == OUTER
    assert saved.versions == {name: held.version for name, held in LEAVES.items()}
    for name, held in LEAVES.items():
        assert saved.arrays[name].dtype == held.array.dtype
        np.testing.assert_array_equal(saved.arrays[name], held.array)


def test_what_a_killed_process_left_is_written_over(tmp_path):
    partial = tmp_path / "round-00000007.partial"
    partial.mkdir()
    (partial / "arrays.bin").write_bytes(b"torn")
    files.write(tmp_path, OUTER, LEAVES)
    assert files.read(tmp_path, 7).outer == OUTER
    assert not partial.exists()


def test_a_round_of_a_lost_fleet_is_written_over_by_the_one_that_was_made_anew(tmp_path):
    files.write(tmp_path, OUTER, {name: Held(held.array + 1, 7) for name, held in LEAVES.items()})
    again = replace(OUTER, generation=Generation(3, "other"))
    files.write(tmp_path, again, LEAVES)
    saved = files.read(tmp_path, 7)
    assert saved.outer == again
    np.testing.assert_array_equal(saved.arrays["0/theta/w|0,1"], LEAVES["0/theta/w|0,1"].array)


@pytest.mark.parametrize("name", [files.ARRAYS, files.MANIFEST])
@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b[:8] + b"\xff" + b[9:], lambda b: b""])
def test_damage_is_found(tmp_path, name, damage):
    files.write(tmp_path, OUTER, LEAVES)
    path = files.folder_of(tmp_path, 7) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="cannot be read"):
        files.read(tmp_path, 7)


def test_a_round_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="round-00000003"):
        files.read(tmp_path, 3)


def test_others_are_deleted(tmp_path):
    for number in (5, 6, 7):
        files.write(tmp_path, _at(number), LEAVES)
    files.keep_only(tmp_path, [6, 7])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000006", "round-00000007"]


def _at(number: int) -> Outer:
    return Outer(OUTER.generation, number, OUTER.digest, OUTER.last, OUTER.voters, OUTER.ledger)
