"""The study of docs/long_context.md: a small model is trained on 2,048 tokens and then on 16,384.

    python benchmarks/long_context/study.py FOLDER [--figure FILE]

It writes documents below FOLDER and trains `short.yaml` and `long.yaml`, as `gregale train` does. Then it prints the
loss by position: of the first model, of the first model with YaRN, and of the second model. The second model continues
a prompt of 16,000 tokens, on four devices and on one. `--figure` draws the losses with matplotlib.

Each document draws its own order of its words, and with it the successor of each word. A word is followed by its
successor with the probability FIXED, else by any word of the document. A model that finds the last place of a word in
its context predicts the next word. Held-out documents have WORDS words: 4,000 tokens show nearly all successors.
"""

import argparse
import json
import subprocess
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from gregale.programs.runtime.evaluation import bounds
from gregale.tracking.metrics import POSITION_LOSS

WORDS, FEWEST, FIXED = 1024, 4, 0.9  # of a document of the training text: FEWEST to WORDS words
SHORT, LONG = 2048, 16384
DOCUMENTS = {"short": (5500, 64, 4096), "long": (150, SHORT, LONG), "held_out": (4, LONG, LONG)}  # of how many tokens
END = "<end>"
HERE = Path(__file__).parent
PROMPT, TOKENS = 16000, 24
SAMPLE = ["sample", "long", "--prompts", "prompt.txt", "--tokens", str(TOKENS), "--temperature", "0", "--batch", "1"]
SPLIT = ["--mesh.context", "4", "--mesh.data", "1"]
RATES = ["--optimizer.learning_rate", "1e-9", "--optimizer.adamw_learning_rate", "1e-9"]
UNTRAINED = ["--name", "yarn", "--steps", "1", *RATES]
GREY = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
LINES = {  # label and format of each model in the figure
    "short": ("trained at 2,048", "o-"),
    "yarn": ("the same with YaRN", "s-"),
    "long": ("then trained at 16,384", "D-"),
    "counting": ("counting predictor", "--"),
}


def document(random: np.random.Generator, tokens: int, words: int) -> str:
    """Return a document of `words` words with its own successors; with its end it has `tokens` tokens."""
    successors = random.permutation(words).tolist()
    follows = (random.random(tokens - 1) < FIXED).tolist()
    others = random.integers(words, size=tokens - 1).tolist()
    places = others[:1]
    for follow, other in zip(follows[1:], others[1:], strict=True):
        places.append(successors[places[-1]] if follow else other)
    return " ".join(map(word, random.permutation(WORDS)[places].tolist()))


def word(number: int) -> str:
    return "w" + "".join(chr(ord("a") + number // 16**digit % 16) for digit in (2, 1, 0))


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
    for number, (name, (count, *tokens)) in enumerate(DOCUMENTS.items()):
        random = np.random.default_rng(number)
        words = (WORDS if name == "held_out" else FEWEST, WORDS)
        with open(folder / f"{name}.txt", "w") as file:
            for _ in range(count):
                length, kinds = (round(np.exp(random.uniform(*np.log(limits)))) for limits in (tokens, words))
                file.write(document(random, length, kinds) + "\n")


def likeliest(prompt: list[str]) -> str:
    """Return the continuation of a prompt in which each word is the most frequent successor of the one before."""
    seen, words = defaultdict(Counter), prompt[-1:]
    for before, after in pairwise(prompt):
        seen[before][after] += 1
    for _ in range(TOKENS):
        words.append(seen[words[-1]].most_common(1)[0][0])
    return " ".join(words[1:])


def counted(documents: Path) -> dict[str, float]:
    """Return the loss of a predictor that counts successors, by the first position of a range.

    After a word with `counts` of its successors so far, s is the fixed one with a probability in proportion to
    `odds ** counts[s]`: Bayes' rule for successors that are drawn independently.
    """
    chance = (1 - FIXED) / WORDS
    odds = (FIXED + chance) / chance
    losses = []
    for line in documents.read_text().splitlines():
        seen, words = defaultdict(Counter), line.split(" ")
        for before, after in pairwise(words):
            counts = seen[before]
            largest = max(counts.values(), default=0)
            weights = {each: odds ** (count - largest) for each, count in counts.items()}
            unseen = odds**-largest
            total = sum(weights.values()) + (WORDS - len(weights)) * unseen
            losses.append(-np.log(FIXED * weights.get(after, unseen) / total + chance))
            counts[after] += 1
    firsts, means = bounds(LONG), np.mean(np.reshape(losses, (-1, LONG - 2)), axis=0)
    return {str(low): means[low:high].mean() for low, high in zip(firsts, [*firsts[1:], LONG], strict=True)}


def by_position(run: Path) -> dict[str, float]:
    """Return the losses of a run's last evaluation by the first position of a range."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if any(key.startswith(POSITION_LOSS) for key in line)][-1]
    return {key.removeprefix(POSITION_LOSS): value for key, value in last.items() if key.startswith(POSITION_LOSS)}


def draw(losses: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the losses of each model over the position."""
    import matplotlib.pyplot as plt  # late, because only the figure needs it

    for key in GREY:
        plt.rcParams[key] = "#808080"
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, values in losses.items():
        label, form = LINES[name]
        middles = [max(int(first), 32) * 2**0.5 for first in values]
        axes.plot(middles, list(values.values()), form, label=label, markersize=4)
    axes.axvline(SHORT, color="#808080", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    ticks = [64 * 4**power for power in range(5)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="position in the document", ylabel="held-out loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--figure", type=Path, help="an SVG of the losses")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    prompt = (folder / "held_out.txt").read_text().split("\n")[0].split(" ")[:PROMPT]
    (folder / "prompt.txt").write_text(" ".join(prompt) + "\n")
    short, long = str(HERE / "short.yaml"), str(HERE / "long.yaml")
    for arguments in (["train", short], ["train", long, *UNTRAINED], ["train", long], [*SAMPLE, *SPLIT], SAMPLE):
        subprocess.run(["gregale", *arguments], cwd=folder, check=True)
    print("The most frequent successors after the prompt:", likeliest(prompt))
    losses = {name: by_position(folder / "runs" / name) for name in ("short", "yarn", "long")}
    losses["counting"] = counted(folder / "held_out.txt")
    print(f"{'position':>10}", *(f"{name:>8}" for name in losses))
    for position in losses["counting"]:
        print(f"{position:>10}", *(f"{each[position]:>8.3f}" for each in losses.values()))
    if options.figure:
        draw(losses, options.figure)


if __name__ == "__main__":
    main()
