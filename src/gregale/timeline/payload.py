"""How many bytes a parameter costs on the wire, by the name of its codec: the codecs' own formulas.

A codec that is not in the table is used by giving its `Payload` (or just its bytes per parameter) to the schedule
functions in `gregale.timeline.methods`.
"""

from gregale.codecs.formats import CODECS, wire_format
from gregale.codecs.formats import WireFormat as Payload
from gregale.errors import UserError

PAYLOADS = {
    "float32": wire_format("none"),
    **{codec: wire_format(codec) for codec in CODECS if codec != "none"},
    # The Streaming DiLoCo paper counts a quarter of bfloat16 and no scales.
    "4bit": Payload(bits=4),
}


def bytes_per_parameter(codec: str) -> float:
    """Bytes that one parameter costs on the wire under the codec of that name.

    Raises:
        UserError: no codec of that name is known.
    """
    if codec not in PAYLOADS:
        raise UserError(f"codec: {codec!r} is not a known wire format; choose one of {', '.join(PAYLOADS)}.")
    return PAYLOADS[codec].bytes_per_parameter
