"""The study of docs/long_context.md: a small model is trained on 2,048 tokens and then on 16,384.

    python benchmarks/long_context/study.py FOLDER

It writes documents below FOLDER and trains `short.yaml` and `long.yaml`, as `gregale train` does. Then it prints the
loss by position: of the first model, of the first model with YaRN, and of the second model.

Each document has a dictionary of its own, a random value for every key, and is a sequence of pairs: `kaar vaad kapm vaaj`.
A value that the document has shown before is known to a model that looks back to it, however far. The rarer a key,
the farther back it is. Keys are drawn from the first K by a power law, with another K for each document.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

KEYS, VALUES = 2048, 64
POWER = 0.6  # of the probabilities of keys: rank ** -POWER
SHORT, LONG = 2048, 16384
DOCUMENTS = {"short": 6000, "long": 400, "held_out": 16}
END = "<end>"
HERE = Path(__file__).parent
UNTRAINED = ["--name", "yarn", "--steps", "1", "--optimizer.learning_rate", "1e-9"]


def document(random: np.random.Generator, tokens: int, keys: int) -> str:
    """Return a document of pairs from its own dictionary: with its end it has `tokens` tokens."""
    values = random.integers(0, VALUES, KEYS)
    names = random.permutation(KEYS)[:keys]
    likely = np.arange(1, keys + 1.0) ** -POWER
    drawn = names[random.choice(keys, (tokens - 1) // 2, p=likely / likely.sum())]
    pairs = [f"{word('k', key)} {word('v', values[key])}" for key in drawn]
    return " ".join([*pairs, word("k", names[0])] if tokens % 2 == 0 else pairs)


def word(kind: str, number: int) -> str:
    """Return the word of a key or a value, letters only: `kaaf`."""
    return kind + "".join(chr(ord("a") + number // 26**place % 26) for place in (2, 1, 0))


def write_text(folder: Path) -> None:
    """Write the documents, one a line, and the tokenizer: a token for each word."""
    words = [word("k", key) for key in range(KEYS)] + [word("v", value) for value in range(VALUES)]
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
                    keys = int(2 ** random.uniform(4, np.log2(KEYS)))
                    file.write(document(random, SHORT, keys) + "\n")
                else:
                    file.write(document(random, LONG, KEYS) + "\n")
