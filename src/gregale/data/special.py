"""Names of special tokens that are written in a text: `<|start_header_id|>` as 26 characters, or as one token."""

from collections.abc import Sequence

from gregale.data.tokenizers import Tokenizer

SHOWN = 3


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
