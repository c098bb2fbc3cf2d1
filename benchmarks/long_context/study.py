"""The study of docs/long_context.md: a small model is trained on 2,048 tokens and then on 16,384.

    python benchmarks/long_context/study.py FOLDER

It writes documents below FOLDER and trains `short.yaml` and `long.yaml`, as `gregale train` does. Then it prints the
loss by position: of the first model, of the first model with YaRN, and of the second model. The second model continues
a prompt of 16,000 tokens, on four devices and on one.

The words of a document are independent. Each document draws COMMON words, which have together the probability SHARE;
the other words have the rest in equal parts. A model that averages over its context learns which words are common. Its
loss falls to the entropy of the words, which is the same for all documents. The losses are printed above the
logarithms of the true probabilities of the same words: no model is below 0 on average.
"""

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np

from gregale.programs.runtime.evaluation import bounds
from gregale.tracking.metrics import POSITION_LOSS

WORDS, COMMON, SHARE = 64, 8, 0.7
SHORT, LONG = 2048, 16384
DOCUMENTS = {"short": (1500, SHORT), "long": (200, LONG), "held_out": (4, LONG)}  # tokens of the longest
END = "<end>"
HERE = Path(__file__).parent
PROMPT = 16000
SAMPLE = ["sample", "long", "--prompts", "prompt.txt", "--tokens", "24", "--temperature", "0", "--batch", "1"]
SPLIT = ["--mesh.context", "4", "--mesh.data", "1"]
RATES = ["--optimizer.learning_rate", "1e-9", "--optimizer.adamw_learning_rate", "1e-9"]
UNTRAINED = ["--name", "yarn", "--steps", "1", *RATES]


def document(random: np.random.Generator, tokens: int) -> str:
    """Return a document with its own probabilities of words; with its end it has `tokens` tokens."""
    common = np.isin(np.arange(WORDS), random.choice(WORDS, COMMON, replace=False))
    likely = np.where(common, SHARE / COMMON, (1 - SHARE) / (WORDS - COMMON))
    return " ".join(map(word, random.choice(WORDS, tokens - 1, p=likely)))


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
    for number, (name, (count, longest)) in enumerate(DOCUMENTS.items()):
        random = np.random.default_rng(number)
        with open(folder / f"{name}.txt", "w") as file:
            for _ in range(count):
                length = longest if name == "held_out" else int(2 ** random.uniform(8, np.log2(longest)))
                file.write(document(random, length) + "\n")


def floor(documents: Path) -> dict[str, float]:
    """Return the mean of -log p of the words by the first position of a range, in documents of LONG tokens."""
    losses = []
    for line in documents.read_text().splitlines():
        words, places, counts = np.unique(line.split(" "), return_inverse=True, return_counts=True)
        common = np.argsort(counts)[-COMMON:]  # far more frequent than the others
        chances = np.where(np.isin(np.arange(len(words)), common), SHARE / COMMON, (1 - SHARE) / (WORDS - COMMON))
        losses.append(-np.log(chances[places[1:]]))  # a token's target is the next one
    firsts, means = bounds(LONG), np.mean(losses, axis=0)
    return {str(low): means[low:high].mean() for low, high in zip(firsts, [*firsts[1:], LONG], strict=True)}


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
    least = floor(folder / "held_out.txt")
    print(f"{'position':>10}", *(f"{name:>8}" for name in runs), f"{'floor':>8}")
    for position, lowest in least.items():
        above = (losses[position] - lowest for losses in runs.values())
        print(f"{position:>10}", *(f"{each:>8.4f}" for each in above), f"{lowest:>8.4f}")


if __name__ == "__main__":
    main()
