"""What compiled steps send, recorded: any other collective, size or number of runs is a change to look at.

The records are of programs whose bytes were also counted by hand, to the byte. `RECORD_SENT=1 pytest TESTS` makes them
anew; the difference of `sent.json` is then what the change does.
"""

import json
import os
from collections import Counter
from pathlib import Path

from gregale.axes.layout import REPLICA
from gregale.cost import Audit

RECORDS = Path(__file__).with_name("sent.json")


def assert_sends_as_recorded(found: Audit) -> None:
    """Bytes of this test's step by collective and mesh axes are as recorded, and it crosses `replica` but once."""
    name = os.environ["PYTEST_CURRENT_TEST"].rpartition("/")[2].removesuffix(" (call)")
    assert [each for each in found.over(REPLICA) if each.loop] == []
    sent = Counter()
    for each in found.collectives:
        sent[f"{each.kind} over {', '.join(each.axes)}"] += each.bytes * (each.times or 0) if each.axes else 0
    records = json.loads(RECORDS.read_text())
    if os.environ.get("RECORD_SENT"):
        records[name] = dict(sorted((+sent).items()))
        RECORDS.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
    assert dict(+sent) == records[name]
