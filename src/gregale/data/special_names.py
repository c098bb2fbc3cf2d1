"""Counts names of special tokens that a tokenizer encodes as characters, for a note to the user."""

import re
from collections import Counter
from collections.abc import Callable, Iterable

from gregale.data.tokenizers import Tokenizer

NAMES_SHOWN = 3


def counter_of_names(tokenizer: Tokenizer) -> Callable[[Iterable[str]], Counter[str]]:
    """Return a function that counts the names of special tokens which the tokenizer encodes as characters in texts."""
    names = frozenset() if tokenizer.parses_special else frozenset(tokenizer.special_names)
    lengths = sorted({len(name) for name in names}, reverse=True)
    beginnings = re.compile("|".join(sorted({re.escape(name[:2]) for name in names}, reverse=True)))

    def count(texts: Iterable[str]) -> Counter[str]:
        found = Counter()
        for text in texts if names else ():
            for at in (each.start() for each in beginnings.finditer(text)):
                found.update([text[at : at + size] for size in lengths if text[at : at + size] in names][:1])
        return found

    return count


def taken_as_text(found: Counter[str], what: str, key: str) -> str:
    """Return a note about names that `counter_of_names` counted; empty if there are none.

    - `what`: the texts, such as the prompts
    - `key`: of the setting by which the names are tokens
    """
    if not found:
        return ""
    named = ", ".join(f"{name} ({count:,})" for name, count in found.most_common(NAMES_SHOWN))
    return (
        f"{found.total():,} names of special tokens in {what} are encoded as characters, most often {named}. "
        f"With {key} they are the tokens."
    )
