"""The study of docs/long_context.md: a small model is trained on 2,048 tokens and then on 16,384.

    python benchmarks/long_context/study.py FOLDER

It writes documents below FOLDER and trains `short.yaml` and `long.yaml`, as `gregale train` does. Then it prints the
loss by position: of the first model, of the first model with YaRN, and of the second model. The second model continues
a prompt of 16,000 tokens, on four devices and on one.

The words of a document are independent, and each document has probabilities of its own, of all words. The more of it
a model has seen, the better it knows them.
"""

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np

from gregale.tracking.metrics import POSITION_LOSS

WORDS = 256
SPREAD = 1.5  # standard deviation of the logarithms of a document's probabilities
SHORT, LONG = 2048, 16384
DOCUMENTS = {"short": 10000, "long": 100, "held_out": 32}
END = "<end>"
HERE = Path(__file__).parent
PROMPT = 16000
SAMPLE = ["sample", "long", "--prompts", "prompt.txt", "--tokens", "24", "--temperature", "0", "--batch", "1"]
SPLIT = ["--mesh.context", "4", "--mesh.data", "1"]
UNTRAINED = ["--name", "yarn", "--steps", "1", "--optimizer.learning_rate", "1e-9"]


def document(random: np.random.Generator, tokens: int) -> str:
    """Return a document with its own probabilities of words; with its end it has `tokens` tokens."""
    likely = np.exp(SPREAD * random.standard_normal(WORDS))
    return " ".join(map(word, random.choice(WORDS, tokens - 1, p=likely / likely.sum())))


def word(number: int) -> str:
    return "w" + chr(ord("a") + number // 16) + chr(ord("a") + number % 16)


def write_text(folder: Path) -> None:
    """Write the documents, one a line, and the tokenizer: a token for each word."""
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
            "vocab": {END: 0} | {f"Ġ{word(number)}": number + 1 for number in range(WORDS)},
            "unk_token": END,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for number, (name, count) in enumerate(DOCUMENTS.items()):
        random = np.random.default_rng(number)
        with open(folder / f"{name}.txt", "w") as file:
            for _ in range(count):
                length = int(2 ** random.uniform(5, np.log2(SHORT))) if name == "short" else LONG
                file.write(document(random, length) + "\n")


def by_position(run: Path) -> dict[str, float]:
    """Return the losses of a run's last evaluation by the first position of a range."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if any(key.startswith(POSITION_LOSS) for key in line)][-1]
    return {key.removeprefix(POSITION_LOSS): value for key, value in last.items() if key.startswith(POSITION_LOSS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    prompt = (folder / "held_out.txt").read_text().split("\n")[0].split(" ")[:PROMPT]
    (folder / "prompt.txt").write_text(" ".join(prompt) + "\n")
    short, long = str(HERE / "short.yaml"), str(HERE / "long.yaml")
    for arguments in (["train", short], ["train", long, *UNTRAINED], ["train", long], [*SAMPLE, *SPLIT], SAMPLE):
        subprocess.run(["gregale", *arguments], cwd=folder, check=True)
    runs = {name: by_position(folder / "runs" / name) for name in ("short", "yarn", "long")}
    print(f"{'position':>10}", *(f"{name:>8}" for name in runs))
    for position in runs["long"]:
        print(f"{position:>10}", *(f"{losses[position]:>8.4f}" for losses in runs.values()))


if __name__ == "__main__":
    main()
