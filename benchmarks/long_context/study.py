"""The study of docs/long_context.md: a small model is trained on 2,048 tokens and then on 16,384.

    python benchmarks/long_context/study.py FOLDER

It writes documents below FOLDER and trains `short.yaml` and `long.yaml`, as `gregale train` does. Then it prints the
loss by position: of the first model, of the first model with YaRN, and of the second model.

A document is a sequence of pairs of words, a name and a value: `kaar vap kapm vac`. In a document a name always has the
same value. So a model that has seen the name before can know the value, however far back it is. Names are drawn by a
power law: the rare ones are far back.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

NAMES, VALUES = 1024, 32
POWER = 0.7  # the probabilities of names are rank ** -POWER
SHORT, LONG = 2048, 16384
DOCUMENTS = {"short": 6000, "long": 400, "held_out": 16}
END = "<end>"
HERE = Path(__file__).parent
UNTRAINED = ["--name", "yarn", "--steps", "1", "--optimizer.learning_rate", "1e-9"]


def document(random: np.random.Generator, tokens: int, names: int) -> str:
    """Return a document of pairs; with its end it has `tokens` tokens.

    - `names`: the most names that it has
    """
    values, order = random.integers(0, VALUES, NAMES), random.permutation(NAMES)[:names]
    likely = np.arange(1, names + 1.0) ** -POWER
    drawn = order[random.choice(names, tokens // 2, p=likely / likely.sum())]
    words = [each for name in drawn for each in (word("k", name), word("v", values[name]))]
    return " ".join(words[: tokens - 1])


def word(kind: str, number: int) -> str:
    """Return the word of a name or a value, letters only: `kaar`."""
    return kind + "".join(chr(ord("a") + number // 26**place % 26) for place in (2, 1, 0))


def write_text(folder: Path) -> None:
    """Write the documents, one a line, and the tokenizer: a token for each word."""
    words = [word("k", name) for name in range(NAMES)] + [word("v", value) for value in range(VALUES)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": END, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "model": {
            "type": "WordLevel",
            "vocab": {END: 0} | {f"Ġ{each}": number for number, each in enumerate(words, 1)},
            "unk_token": END,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for number, (name, count) in enumerate(DOCUMENTS.items()):
        random = np.random.default_rng(number)
        with open(folder / f"{name}.txt", "w") as file:
            for _ in range(count):
                if name == "short":
                    names = int(2 ** random.uniform(4, np.log2(NAMES)))
                    file.write(document(random, SHORT, names) + "\n")
                else:
                    file.write(document(random, LONG, NAMES) + "\n")
