"""The help text, from the metadata of the fields."""

from dataclasses import dataclass, field

import draccus
import pytest

from gregale.cli import invocation
from gregale.cli.invocation import MIN_WIDTH, WIDTH, render, topics
from gregale.errors import UserError
from gregale.programs.train.command import READS
from gregale.runs.config import TrainConfig
from gregale.settings import DECAY, between, whole
from gregale.settings.decoding import entries


@dataclass(frozen=True)
class Pet(draccus.ChoiceRegistry):
    name: str = field(metadata={"help": "what it is called"})


@Pet.register_subclass("cat")
@dataclass(frozen=True)
class Cat(Pet):
    lives: int = field(default=9, metadata={"help": "how many are left"})


@Pet.register_subclass("dog")
@dataclass(frozen=True)
class Dog(Pet):
    toys: tuple[str, ...] = field(default=("ball", "bone"), metadata={"help": "what it plays with"})


@Pet.register_subclass("cow")
@dataclass(frozen=True)
class Cow(Pet):
    """Nothing of its own."""


@dataclass(frozen=True)
class Garden:
    size: float = field(default=1e-3, metadata={"help": "how large"})
    open: bool = field(default=True, metadata={"help": "whether the gate is open"})


@dataclass(frozen=True)
class House:
    rooms: int | None = field(default=None, metadata={"help": "null: as many as there are"})
    garden: Garden = field(default=Garden(size=2.0), metadata={"help": "the garden"})
    pet: Pet = field(default=Cat("Tom"), metadata={"help": "who lives there"})
    guests: dict[str, Garden] = field(default_factory=dict, metadata={"help": "who comes"})


@dataclass(frozen=True)
class Stated:
    small: int = field(default=1, metadata={"help": "how many", "range": whole(1)})
    share: float = field(default=0.5, metadata={"help": "how much", "range": between(0, 1)})
    decay: float | None = field(default=None, metadata={"help": "null: none", "range": DECAY})
    mode: str | None = field(default="fast", metadata={"help": "how", "choices": ("fast", "slow")})
    colours: tuple[str, ...] = field(default=6 * ("scarlet",), metadata={"help": "all of them"})


def test_ranges_and_choices_are_told_and_a_long_default_pushes_the_meaning_to_a_line_of_its_own():
    *lines, colours, meaning = render(Stated).splitlines()
    assert [line.split() for line in lines] == [
        ["--small", "int", "=", "1", "how", "many", "[>=", "1]"],
        ["--share", "float", "=", "0.5", "how", "much", "[0", "to", "1]"],
        ["--decay", "float", "|", "null", "=", "null", "null:", "none", "[>=", "0,", "<", "1]"],
        ["--mode", "fast", "|", "slow", "|", "null", "=", "fast", "how"],
    ]
    assert colours.startswith("  --colours  list of str = [scarlet, ")
    assert meaning.strip() == "all of them"


def test_a_command_shows_the_keys_that_it_reads():
    shown = render(TrainConfig, only=("data", "batch.sequence_length"))
    assert "held_out" in shown
    assert "sequence_length" in shown
    assert not {"microbatches", "learning_rate", "--steps"} & set(shown.split())
    assert topics(TrainConfig, only=("data",)) == ["data"]
    with pytest.raises(UserError, match=r"--help optimizer: there is no such key\. The first parts of .*: data\."):
        render(TrainConfig, "optimizer", only=("data",))


def test_every_key_has_its_type_default_and_meaning():
    assert render(House) == (
        "  --rooms   int | null = null           null: as many as there are\n"
        "  --guests  mapping of names to mapping = {}  who comes\n"
        "  --garden.*\n"
        "      size  float = 2    how large\n"
        "      open  bool = true  whether the gate is open\n"
        "  --pet.*\n"
        "      type  cat | dog | cow = cat  who lives there\n"
        "      name  str = Tom              what it is called\n"
        "  --pet.* with type cat\n"
        "      lives  int = 9  how many are left\n"
        "  --guests.<name>.*\n"
        "      size  float = 0.001  how large\n"
        "      open  bool = true    whether the gate is open\n"
    )
    others = render(House, "pet")
    assert "  --pet.* with type dog, cow\n      name  str (required)  what it is called\n" in others
    assert others.endswith("type dog\n      toys  list of str = [ball, bone]  what it plays with\n")


def test_the_short_help_has_the_default_choices_and_the_topics_have_all(monkeypatch):
    every = list(entries(TrainConfig))
    monkeypatch.setattr(invocation, "entries", lambda _: every)  # once for all topics
    short = render(TrainConfig, only=READS)
    assert len(short.splitlines()) <= 140, "two screens"
    keys = [entry.key for entry in every]
    full = {first: render(TrainConfig, first) for first in {key.split(".")[0] for key in keys}}
    assert all(key.rpartition(".")[2] in full[key.split(".")[0]] for key in keys)
    assert "betas" in short
    assert "iterations" not in short, "Muon's own"
    assert "--sync.outer" not in short, "there is none with sync.type psdp"
    named = "adapter average data evaluation export mapping mesh model notes objective optimizer"
    named += " reduce skip_spikes stages sync trackers"
    assert topics(TrainConfig) == named.split()
    assert "--mapping" not in short


@pytest.mark.parametrize("columns", [40, 90])
def test_help_is_as_wide_as_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = render(TrainConfig).splitlines()
    assert max(map(len, lines)) <= max(MIN_WIDTH, min(columns, WIDTH))
    assert {word for line in lines for word in line.split()} >= {"learning_rate", "hidden", "microbatches"}
