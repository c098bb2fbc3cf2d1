"""The peers to which a member turns directly, so that a message reaches all members while each sends only a few."""

from collections.abc import Sequence


def distances(count: int) -> list[int]:
    """Return 1, 2, 4, ... below `count`.

    Members in a circle that pass a message on at these distances reach all of `count` members in log2(count) hops.
    """
    return [1 << bit for bit in range((count - 1).bit_length())]


def recipients(members: Sequence[str], own: str, turn: int) -> tuple[str, ...]:
    """Return the members at the `distances` from `own`, and one more, which is another one with every `turn`.

    So a member also reaches each other one directly, within as many turns as there are members.
    """
    count, place = len(members), members.index(own)
    found = {*distances(count), 1 + turn % (count - 1)} if count > 1 else ()
    return tuple(members[(place + distance) % count] for distance in sorted(found))
