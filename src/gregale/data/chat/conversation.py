"""Provides conversations as documents."""

from dataclasses import dataclass

ASSISTANT, LAST, COMPLETION, ALL = LOSS_ON = ("assistant", "last", "completion", "all")


@dataclass(frozen=True)
class Conversation:
    """A conversation that a chat template makes a text of.

    - `text`: JSON of an object with `messages` and, if there are any, `tools` and `documents`
    - `content`: the messages' own text, which a tokenizer is trained on
    - `location`: where it was read, for messages
    - `loss_on`: the messages that the loss is on, see `ChatRows`
    - `date`: what the template's `strftime_now` formats, YYYY-MM-DD
    """

    text: str
    content: str
    location: str
    loss_on: str
    date: str

    def __len__(self) -> int:
        """Return the length of the JSON; a conversation is never empty."""
        return len(self.text)


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt, of which somebody prefers the first: two adjacent documents."""

    chosen: Conversation
    rejected: Conversation

    @property
    def content(self) -> str:
        return f"{self.chosen.content}\n{self.rejected.content}"

    @property
    def location(self) -> str:
        return self.chosen.location

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)
