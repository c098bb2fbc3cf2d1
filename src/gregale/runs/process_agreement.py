"""The settings and the text that all processes of a run must have in common.

The processes compare settings before JAX joins them (`gregale.distributed.rendezvous`). They compare the tokenized
text over JAX.
"""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import draccus
import jax

from gregale.checkpoint.multihost import messages_of_all
from gregale.data.config import VALIDATION
from gregale.data.preparation import Corpus
from gregale.data.store import json_sha256
from gregale.distributed.agreement import difference, format_term, from_text, to_text
from gregale.distributed.liveness import process_label
from gregale.distributed.rendezvous import RULE
from gregale.errors import UserError
from gregale.evaluation.tasks import Task
from gregale.runs.history import flat
from gregale.runs.parsing import code_digests
from gregale.runs.sections import section_classes

# Keys in which the processes of a run may differ: keys of a host, keys that only process 0 reads, and paths of text,
# tokenizers and tasks, whose content is compared instead (`data_terms`). All other keys must be equal.
MAY_DIFFER = (
    *("distributed.coordinator", "distributed.process", "distributed.token_file"),
    *("compilation_cache", "data.cache", "data.local_cache", "data.workers", "trackers"),
    *(f"data.{group}.*.{key}" for group in ("sources", "validation") for key in ("files", "exclude", "path")),
    *("data.tokenizer.path", "evaluation.tasks"),
)
_DIGITS = 12  # of a digest


def terms_of(settings: Any) -> dict[str, str]:
    """Return all values of a configuration by dotted keys, and the order of its sources."""
    values = draccus.encode(settings)
    order = {"data.sources": ", ".join(values["data"]["sources"])} if "data" in values else {}
    return order | {key: format_term(value) for key, value in flat(values).items()}


def process_terms(settings: Any) -> dict[str, str]:
    """Return the values of a configuration that all processes of a run must have in common."""
    may_differ = [*MAY_DIFFER, *(f"{key}.{each}" for key, kind in section_classes().items() for each in kind.host_keys)]
    terms = {key: value for key, value in terms_of(settings).items() if not matches(key, may_differ)}
    digests = code_digests(draccus.encode(settings).get("plugins", ()))
    return terms | {f"plugins: {name}": digest for name, digest in digests.items()}


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a dotted key matches one of the patterns, in which `*` stands for any characters."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def data_terms(corpus: Corpus) -> dict[str, str]:
    """Return digests of a run's text: of each source, of the tokenizer, and of the whole text with its split."""
    found = {
        f"data.{key}": f"{len(store.tokens):,} tokens ({_digest(store.manifest['files'])})"
        for key, store in sorted(corpus.stores.items())
    }
    return found | {"data.tokenizer": _digest(corpus.tokenizer.fingerprint), "data": _digest(corpus.fingerprint)}


def is_trained_on(key: str) -> bool:
    """Return whether a key of `data_terms` belongs to training text, not only to evaluation text."""
    return not key.startswith(f"data.{VALIDATION}.")


def agree_on_text(corpus: Corpus, tasks: Sequence[Task]) -> None:
    """Compare the text of all processes; raise `UserError` in all of them if it differs."""
    if jax.process_count() == 1:
        return
    scored = [[task.name, task.kind, repr(task.questions)] for task in tasks]
    own = data_terms(corpus) | {"evaluation.tasks": f"{len(tasks)} files ({_digest(scored)})"}
    if len(set(messages_of_all(_digest(own)))) == 1:
        return
    label = process_label(jax.process_index())
    terms = dict(json.loads(text) for text in messages_of_all(json.dumps([label, to_text(own)])))
    raise UserError(f"{difference({name: from_text(text) for name, text in terms.items()})}. {RULE}")


def _digest(value: Any) -> str:
    return json_sha256(value)[:_DIGITS]
