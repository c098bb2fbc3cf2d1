"""Provides the begin and end of texts: tokens around a prompt, and stop strings."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gregale.data.tokenizers import Tokenizer
from gregale.huggingface.folder import GENERATION, read_json
from gregale.runs.run_directory import RunDirectory

END, STOP, COUNT, INTERRUPTED = "end", "stop", "tokens", "interrupted"  # reasons why a text ended


@dataclass(frozen=True)
class TextFormat:
    """Begin and end of a model's texts."""

    tokenizer: Tokenizer
    beginning: tuple[int, ...] = ()  # tokens before each prompt
    others: tuple[int, ...] = ()  # tokens that end a text, besides the tokenizer's own

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.tokenizer.end_of_document, *self.others)

    def ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt; for an empty one, the token that ends the previous text."""
        return [*self.beginning, *self.tokenizer.encode(prompt).tolist()] or [self.tokenizer.end_of_document]


def text_format_of(run: RunDirectory, tokenizer: Tokenizer) -> TextFormat:
    """Return the format of the texts that the model was trained on.

    The texts of a run end with its end of document. An imported model without further training has the format of
    transformers: the tokens that its tokenizer puts before a text, and all end tokens of its generation config.
    """
    if not run.is_imported:
        return TextFormat(tokenizer)
    path = run.huggingface / GENERATION
    saved: Any = read_json(path).get("eos_token_id") if path.is_file() else None
    ends = saved if isinstance(saved, list) else [saved]
    known = (end for end in ends if isinstance(end, int) and 0 <= end != tokenizer.end_of_document)
    return TextFormat(tokenizer, tokenizer.start, tuple(known))


class StopStrings:
    """Ends a text, which arrives in pieces, before the first stop string that is complete.

    Of two strings that end with the same character, the longer one counts. The class holds back text that may become a
    stop string, so that the result does not depend on the pieces.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held = strings, ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Return the new text that is certainly no stop string; after a match, the text before the match."""
        self._held += piece
        complete = [(at + len(each), -len(each), each) for each in self._strings if (at := self._held.find(each)) >= 0]
        if complete:
            end, _, self.found = min(complete)
            return self._released(end - len(self.found))
        longest = min(len(self._held), max(map(len, self._strings), default=0))
        ends = ((size, self._held[-size:]) for size in range(longest, 0, -1))
        kept = (size for size, end in ends if any(each.startswith(end) for each in self._strings))
        return self._released(len(self._held) - next(kept, 0))

    def finish(self) -> str:
        """Return the text that was held back, if no stop string was found."""
        return "" if self.found is not None else self._released(len(self._held))

    def _released(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        return piece


class Continuation:
    """A text as it comes, token by token, until a token or a stop string ends it or it has `count` tokens.

    - `text`: what is certain of it; neither the token nor the string that ended it is part of it.
    - `tokens`: how many were drawn for it, but for the one that ended it.
    - `ended`: by what (`END`, `STOP`, `COUNT`, `INTERRUPTED`); None while it goes on.
    """

    def __init__(self, form: TextFormat, count: int, stops: Sequence[str] = ()):
        self.text, self.tokens, self.count = "", 0, count
        self.ended: str | None = None
        self._ends, self._stops = form.ends, StopStrings(stops)
        self._pieces = form.tokenizer.vocabulary_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens; return the text that they certainly add, in complete characters."""
        before = len(self.text)
        for token in tokens:
            if self.ended is not None:
                break
            if token in self._ends:
                self.finish(END)
                break
            self.tokens += 1
            self.text += self._stops.push(self._decoder.decode(self._pieces[token]))
            if self._stops.found is not None:
                self.ended = STOP
            elif self.tokens == self.count:
                self.finish(COUNT)
        return self.text[before:]

    def finish(self, ended: str) -> str:
        """End the text; return the text that was held back."""
        if self.ended is not None:
            return ""
        rest = self._stops.push(self._decoder.decode(b"", final=True))
        self.ended = ended if self._stops.found is None else STOP
        rest += self._stops.finish()
        self.text += rest
        return rest
