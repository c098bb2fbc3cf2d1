"""The processes of a run compare what has to be the same in all of them, and end together if it is not.

Settings and versions are compared over the connections of the roll call, before JAX is asked to join the processes;
text, which is known when it is tokenized, over JAX. Process 0 compares the settings and tells the others the result, so
all end with the same message.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import draccus
import jax
import jaxlib.version

import gregale
from gregale.data.config import VALIDATION
from gregale.data.parts import json_sha256
from gregale.data.preparation import Corpus
from gregale.data.tasks.files import Task
from gregale.errors import UserError
from gregale.services.agreement import Terms, difference, from_text, in_words, to_text
from gregale.services.checkpoint.processes import messages_of_all, texts_of_all
from gregale.services.distributed import DistributedConfig
from gregale.services.history import flat
from gregale.services.peers import EXIT_CODE, Peer, log_line, process_label

# What the processes of a run may differ in: what belongs to a host, what only process 0 reads, and paths of text, of a
# tokenizer and of tasks, whose content is compared instead (`data_terms`). All else has to be the same.
MAY_DIFFER = (
    *("distributed.coordinator", "distributed.process", "distributed.token_file"),
    *("islands.bind", "islands.token_file"),
    *("compilation_cache", "data.cache", "data.local_cache", "data.workers", "trackers"),
    *(f"data.{group}.*.{key}" for group in ("sources", "validation") for key in ("files", "exclude", "path")),
    *("data.tokenizer.path", "evaluation.tasks"),
)
RULE = "All processes of a run need the same configuration, text, and versions of Gregale and JAX."
OTHER_VERSION = "runs another version of Gregale, which does not tell its settings"
_DIGITS = 12  # of a digest


def terms_of(settings: Any) -> dict[str, str]:
    """Return all values of a configuration by dotted keys, and for mappings of sources their order."""
    order = {"data.sources": ", ".join(settings.data.sources)} if hasattr(settings, "data") else {}
    return order | {key: in_words(value) for key, value in flat(draccus.encode(settings)).items()}


def terms_of_process(settings: Any) -> dict[str, str]:
    """Return what has to be the same in all processes, and is known before any text is read."""
    versions = {
        "the version of Gregale": gregale.__version__,
        "the digest of Gregale's source": source_digest(),
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
    }
    if settings is None:
        return versions
    return versions | {key: value for key, value in terms_of(settings).items() if not matches(key, MAY_DIFFER)}


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a dotted key is of one of the patterns, in which `*` stands for any characters."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


@cache
def source_digest() -> str:
    """Return a digest of the source of this package, which two checkouts of one version may have different."""
    folder, found = Path(gregale.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:_DIGITS]


def agree(peers: Sequence[Peer], config: DistributedConfig, settings: Any) -> None:
    """Compare the settings of all processes; raise `UserError` in all of them if they differ.

    Ends the process with the exit code of a lost one if another one is lost meanwhile.

    - `peers`: as `roll_call` returns them
    - `settings`: the configuration, a dataclass, or None
    """
    own = terms_of_process(settings)
    if config.process == 0:
        found: dict[str, Terms] = {process_label(0): own}
        for peer in peers:
            found[peer.name] = from_text(_told(peer, "settings", config.timeout_seconds))
        if differs := difference(found):
            text = f"{differs}. {RULE}"
            for peer in peers:
                peer.tell(f"no {text}")
            raise UserError(text)
        for peer in peers:
            peer.tell("agreed ")
        return
    (process_0,) = peers
    process_0.tell(f"settings {to_text(own)}")
    _told(process_0, "agreed", 2 * config.timeout_seconds)


def _told(peer: Peer, word: str, seconds: float) -> str:
    """Return what a peer says behind a word; raise the `UserError` that it tells in place of that."""
    peer.connection.settimeout(seconds)
    line = peer.line()
    if line is None:
        log_line(f"error: {peer.name} was lost while the settings of all processes were compared.")
        sys.exit(EXIT_CODE)
    peer.connection.settimeout(None)
    found, _, rest = line.partition(" ")
    if found == "no":
        raise UserError(rest)
    if found != word:
        raise UserError(f"{peer.name} {OTHER_VERSION}. {RULE}")
    return rest


def data_terms(corpus: Corpus) -> dict[str, str]:
    """Return what tells the text of a run from another: each source, the tokenizer, and all of it with its split."""
    found = {
        f"data.{key}": f"{len(store.tokens):,} tokens ({_digest(store.manifest['files'])})"
        for key, store in sorted(corpus.stores.items())
    }
    return found | {"data.tokenizer": _digest(corpus.tokenizer.fingerprint), "data": _digest(corpus.fingerprint)}


def is_trained_on(key: str) -> bool:
    """Return whether a key of `data_terms` is of text to train on, not only to evaluate on."""
    return not key.startswith(f"data.{VALIDATION}.")


def agree_on_text(corpus: Corpus, tasks: Sequence[Task]) -> None:
    """Compare the text of all processes; raise `UserError` in all of them if it differs."""
    if jax.process_count() == 1:
        return
    scored = [[task.name, task.kind, repr(task.questions)] for task in tasks]
    own = data_terms(corpus) | {"evaluation.tasks": f"{len(tasks)} files ({_digest(scored)})"}
    if len(set(messages_of_all(_digest(own)))) == 1:
        return
    told = [json.loads(text) for text in texts_of_all(json.dumps([process_label(jax.process_index()), to_text(own)]))]
    raise UserError(f"{difference({name: from_text(text) for name, text in told})}. {RULE}")


def _digest(value: Any) -> str:
    return json_sha256(value)[:_DIGITS]
