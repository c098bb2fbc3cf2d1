"""Provides the tokens of conversations, and which of them the loss is on."""

from typing import NamedTuple

import numpy as np

from gregale.data.chat.conversation import ALL, ASSISTANT, Conversation
from gregale.data.chat.renderer import Limits, NotRendered, Rendered, Renderer
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError


class Encoded(NamedTuple):
    """A document as tokens.

    - `ids`: int32 [token]
    - `more_bytes`: bytes of text of each token beyond its vocabulary entry, int64 [token]
    - `supervised`: whether the loss is on each token, bool [token]; None: on all
    """

    ids: np.ndarray
    more_bytes: np.ndarray
    supervised: np.ndarray | None = None

    def ended(self, end: int) -> "Encoded":
        """Return the document with the token that ends it, unless it is there; the loss is not on one that is added."""
        if self.supervised is not None and len(self.ids) and self.ids[-1] == end:
            return self
        supervised = None if self.supervised is None else np.append(self.supervised, False)
        return Encoded(np.append(self.ids, end), np.append(self.more_bytes, 0), supervised)


class ChatEncoder:
    """Encodes conversations with the chat template of a tokenizer; use it in a `with` statement."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits = Limits()):  # noqa: B008
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._renderer = Renderer(template, list(tokenizer.control_tokens), limits) if template else None

    def __enter__(self) -> "ChatEncoder":
        return self

    def __exit__(self, *given: object) -> None:
        if self._renderer is not None:
            self._renderer.__exit__(*given)

    def encode(self, conversation: Conversation) -> Encoded:
        """Return the tokens of a conversation; raise `NotRendered` or `UserError`, see `Renderer`.

        The text is tokenized once, as a whole. The loss is on each token that has a character of a span.
        """
        rendered = self._rendered(conversation, prompt=False)
        ids, more_bytes, offsets = self._tokenizer.encode_pieces(rendered.pieces)
        if conversation.loss_on == ALL:
            return Encoded(ids, more_bytes)
        starts, ends = np.maximum.accumulate(offsets, axis=0).T
        supervised = np.zeros(len(ids), bool)
        for first, end in rendered.spans:
            supervised[np.searchsorted(ends, first, side="right") : np.searchsorted(starts, end)] = True
        return Encoded(ids, more_bytes, supervised)

    def prompt(self, conversation: Conversation) -> np.ndarray:
        """Return the ids of a conversation that the assistant continues, int32 [token]."""
        return self._tokenizer.encode_pieces(self._rendered(conversation, prompt=True).pieces)[0]

    def end_of_turn(self) -> int:
        """Return the id that ends the assistant's turns by the template; the end of a document if it is not certain."""
        messages = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
        try:
            found = self.encode(Conversation(messages, "", "a conversation of two words", ASSISTANT, "2025-01-01"))
        except (NotRendered, UserError):
            return self._tokenizer.end_of_document
        assert found.supervised is not None
        last = found.ids[found.supervised][-1:].tolist()
        ends = {self._tokenizer.end_of_document, *self._tokenizer.control_tokens.values()}
        return last[0] if last and last[0] in ends else self._tokenizer.end_of_document

    def _rendered(self, conversation: Conversation, prompt: bool) -> Rendered:
        if self._renderer is None:
            raise UserError("data.chat_template: this run's tokenizer has no chat template; name a file of Jinja.")
        return self._renderer(conversation, prompt)
