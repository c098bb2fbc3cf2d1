"""Decisions from shapes about the exchange of tokens between experts, for the model and for closed forms."""

SHARE = 1.5  # rows of a round to a device, over an even share
MULTIPLE = 8  # of these rows
FURTHER_ROUNDS = "further_rounds"  # scope of the loop over rounds after the first: with even routing it never runs


def rows_to_a_device(pairs: int, devices: int) -> int:
    """Return the rows that a device sends to each of `devices` devices in a round.

    - `pairs`: the (token, expert) pairs of a microbatch on a device
    """
    even = -(-int(SHARE * pairs) // devices)
    return min(-(-even // MULTIPLE) * MULTIPLE, pairs)
