"""Names of special tokens that are written in a text: `<|start_header_id|>` as 26 characters, or as one token."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from gregale.data.tokenizers import Tokenizer

SHOWN = 3


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


def counted_as_text(found: Mapping[str, int]) -> str:
    """Return a note about the names that `counter_of_names` counted in a source."""
    named = ", ".join(f"{name} ({count:,})" for name, count in Counter(found).most_common(SHOWN))
    return (
        f"{sum(found.values()):,} names of special tokens in the text are encoded as characters, most often {named}. "
        "With data.tokenizer.parse_special, which type file has, they are the tokens."
    )


def taken_as_text(texts: Sequence[str], tokenizer: Tokenizer, what: str) -> str:
    """Return a line about names of special tokens that are encoded as plain text; empty if there are none.

    - `what`: the kind of the texts, such as prompts
    """
    if tokenizer.parses_special:
        return ""
    found = [[name for name in tokenizer.special_names if name in text] for text in texts]
    names = list(dict.fromkeys(name for each in found for name in each))
    if not names:
        return ""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    count = f"{sum(map(bool, found)):,} of {len(texts):,} {what}"
    return (
        f"Names of special tokens are plain text in {count}, as in documents: {', '.join(names[:SHOWN])}{more}. With "
        "parse_special they are the tokens."
    )
