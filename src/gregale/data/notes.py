"""What the user is told of token stores: documents that were left out, and bytes of text that were not counted."""

from collections.abc import Iterable, Mapping

from gregale.data.assembly import in_words
from gregale.data.build import skipped_in
from gregale.data.sources import Skipped
from gregale.data.store import TokenStore
from gregale.data.tokenizers import Tokenizer


def notes_on(stores: Mapping[str, TokenStore], tokenizer: Tokenizer) -> tuple[str, ...]:
    """A note for each store that lacks documents or the bytes of its text, by the key of its source."""
    skipped = (note for key, store in stores.items() for note in notes_of(key, skipped_in(store)))
    return (*skipped, *uncounted(stores.values(), tokenizer))


def notes_of(key: str, skipped: Skipped) -> list[str]:
    """Return the lines of a note if documents of a source were left out."""
    return [f"data.{key}:", *(f"  {line}" for line in in_words(skipped))] if skipped.count else []


def uncounted(stores: Iterable[TokenStore], tokenizer: Tokenizer) -> list[str]:
    """A note for each store without the bytes of its text, whose tokens do not say them."""
    return [
        f"{store.folder}: an older version of Gregale built this token store and did not count the bytes of its text. "
        "Its tokenizer adds or changes characters, so bits per byte are those of the tokens' bytes, as before. Delete "
        "the folder, and it is built again with the count."
        for store in stores
        if not (tokenizer.is_exact or store.counts_text)
    ]
