"""The settings that the islands of a fleet must have in common. All others may differ from island to island."""

from collections.abc import Sequence

from gregale.data.preparation import Corpus
from gregale.distributed.agreement import format_term, to_text
from gregale.islands.protocol.ledger import digest_of
from gregale.islands.protocol.settings import timing_of
from gregale.methods.island_outer import HostOuter
from gregale.programs.runtime.setup import Setup
from gregale.runs.process_agreement import data_terms, is_trained_on, matches, terms_of

# Configuration keys. All islands share one order of examples. Batch sizes may differ: messages are weighted by their
# tokens, and data is leased in batches of each island's own size.
MUST_AGREE = (
    *("steps", "seed", "model.*", "sync.*", "reduce.*", "pipeline", "pipeline.*"),
    "batch.sequence_length",
    *("data.sources", "data.sources.*.weight", "data.held_out", "data.shuffle", "data.cross_documents"),
    *("islands.min_members", "islands.min_members_to_start", "islands.lockstep", "islands.lease_steps"),
    *("islands.outlier_factor", "islands.network"),
)


def agreement(setup: Setup, corpus: Corpus, shards: Sequence[str]) -> str:
    """Return the settings and text that all islands must share, for an island's header.

    - `shards`: `shards_of` of each of the island's hosts
    """
    hosts = {"the number of an island's hosts": str(len(shards))}
    seconds = {"islands.heartbeat_seconds": format_term(timing_of(setup.config.islands).heartbeat_seconds)}
    settings = {key: value for key, value in terms_of(setup.config).items() if matches(key, MUST_AGREE)}
    text = {key: value for key, value in data_terms(corpus).items() if is_trained_on(key)}
    shapes = {"the digest of the shapes of the mesh's shards": digest_of(list(shards))}
    return to_text(hosts | settings | seconds | text | shapes)


def shards_of(outer: HostOuter) -> str:
    """Return a digest of the layout of this host's shards of the outer state."""
    return digest_of({name: (dtype.str, list(shape)) for name, (dtype, shape) in outer.expected().items()})
