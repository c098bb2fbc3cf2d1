"""Putting a token store together when all of its parts are sealed."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gregale.data.parts import LENGTH, Damaged, Seal, Task, read_part, read_seal, token_dtype
from gregale.data.progress import Report
from gregale.data.sources import Skipped
from gregale.data.store import DOCUMENTS_NAME, MANIFEST_NAME, TOKENS_NAME, finish_store, flush
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.storage import Place, Remote, upload


def put_together(tasks: Sequence[Task], tokenizer: Tokenizer, parts: Place, folder: Place, report: Report) -> None:
    """Makes a store of its parts, whole or not at all, after reading and checking each of them.

    On a disk the tokens become one file, so that it can be mapped into memory. In an object store they stay where they
    are, and only what describes them is written.

    Args:
        tasks: what was encoded.
        tokenizer: by which.
        parts: where the parts lie.
        folder: the store.
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
    with tempfile.TemporaryDirectory(prefix=".whole-", dir=None if isinstance(parts, Remote) else parts) as name:
        temporary = Path(name)
        with open(os.devnull if isinstance(folder, Remote) else temporary / TOKENS_NAME, "wb") as output:
            lengths, tokens = copied(parts, seals, output, report)
        offsets = np.concatenate([[0], *lengths]).cumsum(dtype=np.int64)
        finish_store(temporary, offsets, description, tokens)
        publish(temporary, folder)


def sealed(parts: Place, number: int) -> Seal:
    """The seal of a part, which has one."""
    if (seal := read_seal(parts, number)) is None:
        raise Damaged(number)
    return seal


def copied(parts: Place, seals: Sequence[Seal], output: BinaryIO, report: Report) -> tuple[list[np.ndarray], dict]:
    """Writes the tokens of all parts one after the other.

    Returns:
        The documents' lengths, an array for each part, and what the manifest says of the tokens.
    """
    digest, lengths, size, done = hashlib.sha256(), [], 0, 0
    total = sum(seal.size_bytes for seal in seals)
    for number, seal in enumerate(seals):
        left, rest = seal.tokens * seal.itemsize, b""
        size += left
        for block in read_part(parts, number, seal):
            output.write(block[:left])
            digest.update(block[:left])
            rest += block[left:]
            left = max(left - len(block), 0)
            done += len(block)
        lengths.append(np.frombuffer(rest, LENGTH))
        if len(seals) > 1:  # one takes no time
            report("putting together", done, total)
    return lengths, {"bytes": size, "sha256": digest.hexdigest()}


def publish(temporary: Path, folder: Place) -> None:
    """Gives a complete store its name; another may have come first."""
    if isinstance(folder, Remote):
        for name in (DOCUMENTS_NAME, MANIFEST_NAME):  # with the manifest it is complete
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
