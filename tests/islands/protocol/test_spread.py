"""Announcements reach everybody while everybody sends few."""

import pytest

from gregale.islands.protocol.decision import distances, recipients


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 64, 100, 256, 257])
def test_all_are_reached_in_logarithmically_many_hops_and_each_reaches_each_within_as_many_turns(count):
    members = [f"{number}:1" for number in range(count)]
    reached = {members[-1]}
    for _ in range((count - 1).bit_length()):
        reached |= {other for each in reached for other in recipients(members, each, 0)}
    assert reached == {*members}
    assert len(distances(count)) == (count - 1).bit_length()
    turns = [recipients(members, members[0], turn) for turn in range(count - 1)]
    assert {each for turn in turns for each in turn} == {*members[1:]}, "directly, too"
    assert all(len(turn) <= (count - 1).bit_length() + 1 for turn in turns)
