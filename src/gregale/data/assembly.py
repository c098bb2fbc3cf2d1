"""Putting a token store together when all of its parts are sealed."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gregale.data.merging import LENGTHS_NAME, WHOLE_NAME, merge, split
from gregale.data.parts import LENGTH, Damaged, Seal, Task, read_seal, token_dtype
from gregale.data.progress import Report
from gregale.data.sources import Skipped
from gregale.data.store import DOCUMENTS_NAME, MANIFEST_NAME, TEXT_BYTES_NAME, TOKENS_NAME, finish_store
from gregale.data.text_bytes import Corrections
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.files import flush
from gregale.storage import Place, Remote, upload


def put_together(
    tasks: Sequence[Task], tokenizer: Tokenizer, parts: Place, folder: Place, removes: bool, report: Report
) -> None:
    """Makes a store of its parts, whole or not at all, after reading and checking each of them.

    On a disk the tokens become one file, so that it can be mapped into memory. In an object store they stay where they
    are, and only what describes them is written.

    Args:
        tasks: what was encoded.
        tokenizer: by which.
        parts: where the parts lie.
        folder: the store.
        removes: on a disk, each part goes when its tokens are in the one file; else somebody still reads them.
        report: told the bytes of the parts that were read, as `putting together`.

    Raises:
        Damaged: a part is not what was sealed.
        UserError: the source has no tokens.
    """
    seals = [sealed(parts, task.number) for task in tasks]
    skipped = Skipped()
    for seal in seals:
        skipped.add(Skipped(**seal.skipped))
    if not any(seal.tokens for seal in seals):
        total = sum(task.size_bytes for task in tasks)
        left_out = in_words(skipped) if skipped.count else []
        raise UserError(" ".join([f"empty: no document with any text in {total} bytes of input.", *left_out]))
    description = {
        "dtype": token_dtype(tokenizer.vocabulary_size).name,
        "tokenizer": tokenizer.fingerprint,
        "source": tasks[0].source.identity(),
        "parts": [seal.documents for seal in seals],
    } | ({"skipped": asdict(skipped)} if skipped.count else {})
    if isinstance(parts, Remote):
        with tempfile.TemporaryDirectory(prefix=".whole-") as name:
            lengths, tokens = measured(parts, seals, report)
            finish_store(Path(name), offsets_of(lengths), description, tokens, corrections_of(seals))
            publish(Path(name), folder)
    else:
        tokens = merge(parts, seals, removes, report)
        lengths = np.fromfile(parts / LENGTHS_NAME, LENGTH)
        for path in (parts / WHOLE_NAME).iterdir():
            if path.name != TOKENS_NAME:  # of one that was killed here
                path.unlink(missing_ok=True)
        finish_store(parts / WHOLE_NAME, offsets_of(lengths), description, tokens, corrections_of(seals))
        publish(parts / WHOLE_NAME, folder)


def sealed(parts: Place, number: int) -> Seal:
    """The seal of a part, which has one."""
    if (seal := read_seal(parts, number)) is None:
        raise Damaged(number)
    return seal


def measured(parts: Place, seals: Sequence[Seal], report: Report) -> tuple[np.ndarray, dict]:
    """Reads all parts.

    Returns:
        The documents' lengths, and what the manifest says of the tokens.
    """
    digest, lengths = hashlib.sha256(), bytearray()
    size, done, total = 0, 0, sum(seal.size_bytes for seal in seals)
    for number, seal in enumerate(seals):
        split(parts, number, seal, digest.update, lengths.extend)
        size += seal.tokens * seal.itemsize
        done += seal.size_bytes
        if len(seals) > 1:  # one takes no time
            report("putting together", done, total)
    return np.frombuffer(lengths, LENGTH), {"bytes": size, "sha256": digest.hexdigest()}


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where documents of these lengths begin, and the end of the last, int64 [document + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def corrections_of(seals: Sequence[Seal]) -> Corrections | None:
    """Those of all parts together; None if a part has none."""
    parts = [(seal.tokens, Corrections.unpacked(seal.corrections)) for seal in seals if seal.corrections is not None]
    return Corrections.joined(parts) if len(parts) == len(seals) else None


def publish(temporary: Path, folder: Place) -> None:
    """Gives a complete store its name; another may have come first."""
    if isinstance(folder, Remote):
        described = [name for name in (TEXT_BYTES_NAME, DOCUMENTS_NAME) if (temporary / name).exists()]
        for name in (*described, MANIFEST_NAME):  # with the manifest it is complete
            upload(temporary / name, folder / name)
        return
    temporary.chmod(0o755)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
    flush(folder.parent)


def in_words(skipped: Skipped) -> list[str]:
    """How many documents were left out and where the first few stand, a line each."""
    more = skipped.count - len(skipped.first)
    count = f"{skipped.count:,} bad document(s) skipped{', the first' if more else ''}:"
    return [count, *skipped.first, *([f"and {more:,} more"] if more else [])]
