"""The picture of the rounds, from what islands wrote down."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from gregale.programs.islands.rounds import draw_rounds, rounds_of

ROUND = {"round": 1, "began": 10.0, "ended": 12.0, "seconds": 2.0, "waiting_seconds": 0.5}


def test_a_torn_line_is_passed_over(tmp_path):
    (tmp_path / "rounds.jsonl").write_text(json.dumps(ROUND) + "\n" + '{"round": 2, "be')
    assert rounds_of(tmp_path) == [ROUND]
    assert rounds_of(tmp_path / "none") == []


def test_it_is_drawn_also_for_an_island_without_rounds(tmp_path):
    def shapes(rounds) -> int:
        draw_rounds(tmp_path / "rounds.svg", rounds)
        return len(list(ElementTree.parse(tmp_path / "rounds.svg").iter("{http://www.w3.org/2000/svg}path")))

    one, more = {"a": [ROUND], "b": []}, {"a": [ROUND, {**ROUND, "round": 2, "healed": True}], "b": []}
    assert shapes(more) > shapes(one)
