"""Figures of `gregale eval` beside those of lm-evaluation-harness on the exported model, from the same files.

    python benchmarks/harness.py FOLDER --peer PYTHON [--steps 120] [--questions 60]

PYTHON is one with lm_eval, transformers and torch. A small model with a byte-pair tokenizer is trained on Python's
standard library, by PSDP on eight simulated devices, in float32, and exported. Tasks of every kind are made of text
that it was not trained on; then both programs score them, and a table of their figures is printed. What is in FOLDER
already is not made again.

lm_eval reads the same JSON lines: the YAML files that are written for it say, with functions of `kinds.py` beside them,
what Gregale's format means in its terms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from gregale.data.sources.base import expand

ROOT = Path(__file__).parent.parent
RUN = "harness"
CONTEXT = 128
TRAIN = (
    *("--name", RUN, "--optimizer.schedule.warmup", "0.1", "--samples.prompts", "[]", "--evaluation.bigram", "false"),
    *("--data.tokenizer.type", "bpe", "--data.tokenizer.vocabulary", "1000", "--batch.sequence_length", str(CONTEXT)),
    *("--model.layers", "2", "--model.hidden", "96", "--model.mlp", "256", "--evaluation.every", "null"),
    *("--data.sources.python.files", '["{stdlib}/[a-n]*.py", "{stdlib}/asyncio/*.py"]'),
)
HELD_BACK = "{stdlib}/[o-z]*.py"  # what the tasks are made of
KINDS = '''
"""What the files of tasks mean, in the terms of lm_eval."""

FORM = {"prefix": "", "delimiter": " ", "gap": "_"}


def questions(docs):
    first = docs[0]
    given = {key: first[key] for key in FORM if first.get(key) is not None} if first.get("kind") else {}
    form = FORM | given
    kept = docs.filter(lambda doc: doc["context"] is not None)
    return kept.map(lambda doc: {"context": form["prefix"] + doc["context"], "form": form})


def choices(doc):
    return [doc["form"]["delimiter"] + choice for choice in doc["choices"]]


def filled(doc):
    before = doc["context"].split(doc["form"]["gap"])[0]
    return [before + choice for choice in doc["choices"]]


def after(doc):
    return doc["context"].split(doc["form"]["gap"])[1]


def answer(doc):
    return doc["answer"]


def words(doc):
    return doc["form"]["delimiter"] + doc["answer"]
'''


class Function:
    """A function of `kinds.py` in a YAML file."""

    def __init__(self, name: str):
        self.name = name


class Dumper(yaml.SafeDumper):
    pass


Dumper.add_representer(Function, lambda dumper, value: dumper.represent_scalar("!function", f"kinds.{value.name}"))


def metric(*names: str) -> list[dict]:
    return [{"metric": name} for name in names]


# What of lm_eval a kind is.
IN_LM_EVAL = {
    "multiple_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": Function("answer"),
        "target_delimiter": " ",
        "metric_list": metric("acc", "acc_norm"),
    },
    "cloze": {
        "output_type": "multiple_choice",
        "doc_to_text": Function("answer"),
        "doc_to_choice": Function("filled"),
        "doc_to_target": Function("after"),
        "target_delimiter": "",
        "metric_list": metric("acc"),
    },
    "greedy_match": {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": Function("words"),
        "metric_list": metric("acc", "perplexity"),
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": metric("bits_per_byte"),
    },
}


def pieces(source: random.Random) -> Iterator[tuple[str, str]]:
    """Some lines of a file that is not trained on, and the line after them, again and again."""
    from glob import glob

    paths = sorted(glob(expand(HELD_BACK)))
    while True:
        rows = Path(source.choice(paths)).read_text(encoding="utf-8", errors="replace").splitlines()
        at = source.randrange(1, max(2, len(rows) - 1))
        before, line = rows[max(0, at - source.randrange(1, 40)) : at], rows[min(at, len(rows) - 1)].strip()
        if len(line.split()) > 2 and any(each.strip() for each in before):
            yield "\n".join(before), line


def write_tasks(folder: Path, count: int) -> None:
    """Files of every kind; some contexts end with white space, are empty, or are longer than the model's context."""
    source = random.Random(0)
    found = pieces(source)
    choices, gaps, matches = [], [], []
    for number in range(count):
        context, right = next(found)
        others = [line for _, line in (next(found) for _ in range(3)) if line != right]
        answer = source.randrange(len(others) + 1)
        question = {"context": "" if number % 10 == 9 else context, "choices": others, "answer": answer}
        question["choices"].insert(answer, right + (" # na\u00efve \u6d77" if number % 7 == 0 else ""))
        choices.append(question)
        context, line = next(found)
        first, *rest = line.replace("\u25a1", "").split(" ")
        names = [next(found)[1].split(" ")[0], "return"]
        names.insert(answer := source.randrange(3), first)
        gaps.append({"context": f"{context}\n\u25a1 {' '.join(rest)}", "choices": names, "answer": answer})
        context, line = next(found)
        words = line.split(" ")
        matches.append({"context": f"{context}\n{' '.join(words[:-1])}", "answer": words[-1]})
    write(folder / "choice.jsonl", {"kind": "multiple_choice", "prefix": "# Python\n"}, *choices)
    spaced = [{**each, "context": each["context"] and each["context"] + "\n  "} for each in choices]
    write(folder / "bare.jsonl", *spaced)
    write(folder / "cloze.jsonl", {"kind": "cloze", "gap": "\u25a1"}, *gaps)
    write(folder / "match.jsonl", {"kind": "greedy_match"}, *matches)
    write(folder / "text.jsonl", *({"text": f"{before}\n{line}"} for before, line in (next(found) for _ in range(20))))


def write(path: Path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_for_peer(tasks: Path, folder: Path) -> list[str]:
    """The tasks as YAML for lm_eval; returns their names."""
    folder.mkdir(exist_ok=True)
    (folder / "kinds.py").write_text(KINDS)
    names = []
    for path in sorted(tasks.glob("*.jsonl")):
        first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        kind = "text" if "text" in first else first.get("kind", "multiple_choice")
        settings = {
            "task": f"gregale_{path.stem}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
            "test_split": "test",
            **({} if kind == "text" else {"process_docs": Function("questions")}),
            **IN_LM_EVAL[kind],
        }
        (folder / f"{path.stem}.yaml").write_text(yaml.dump(settings, Dumper=Dumper, sort_keys=False))
        names.append(settings["task"])
    return names


def theirs(python: str, exported: Path, tasks: Path, folder: Path) -> dict[str, float]:
    """The figures of lm_eval, `acc.NAME` and so on."""
    names = write_for_peer(tasks, folder / "lm_eval")
    settings = f"pretrained={exported.resolve()},dtype=float32,max_length={CONTEXT}"
    command = [
        *(python, "-m", "lm_eval", "run", "--model", "hf", "--model_args", settings, "--device", "cpu"),
        *("--include_path", str(folder / "lm_eval"), "--tasks", ",".join(names), "--batch_size", "8"),
        *("--output_path", str(folder / "results")),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")},
        "HF_HOME": str((folder / "hub").resolve()),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    subprocess.run(command, env=environment, check=True)
    newest = max((folder / "results").rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    found = {}
    for name, figures in json.loads(newest.read_text())["results"].items():
        for key, value in figures.items():
            figure, _, of = key.partition(",")
            if of == "none" and not isinstance(value, str):
                found[f"{figure}.{name.removeprefix('gregale_')}"] = value
    return found


def ours(folder: Path, *arguments: str) -> dict[str, float]:
    """The figures of `gregale eval`."""
    return json.loads(gregale(folder, "eval", f"runs/{RUN}", "--json", *arguments))


def gregale(folder: Path, *arguments: str) -> bytes:
    """Runs a command in a folder; returns what it prints."""
    command = [sys.executable, "-m", "gregale", *arguments]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True).stdout


def made(folder: Path, steps: int, questions: int) -> tuple[Path, Path]:
    """The exported model and the tasks; the run, its export and the tasks are made where they are not there."""
    exported, tasks = folder / "exported", folder / "tasks"
    if not exported.exists():
        config = str(ROOT / "config" / "quickstart.yaml")
        gregale(folder, "train", config, "--steps", str(steps), "--checkpoint.every", str(steps), *TRAIN)
        gregale(folder, "export", f"runs/{RUN}", str(exported))
    if not tasks.exists():
        tasks.mkdir()
        write_tasks(tasks, questions)
    return exported, tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", required=True, help="a Python with lm_eval")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--questions", type=int, default=60)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    exported, tasks = made(folder, options.steps, options.questions)
    mine = ours(folder, "--tasks", *(str(path) for path in sorted(tasks.glob("*.jsonl")) if path.stem != "text"))
    text = ours(folder, "--data", str(tasks / "text.jsonl"), "--stride", str(CONTEXT))
    mine |= {f"{name}.text": value for name, value in text.items()}
    others = theirs(options.peer, exported, tasks, folder)
    print("| task | figure | Gregale | lm-evaluation-harness | difference |\n|---|---|---|---|---|")
    for key, value in others.items():
        figure, _, task = key.partition(".")
        if key in mine:
            print(f"| {task} | `{figure}` | {mine[key]:.6f} | {value:.6f} | {abs(mine[key] - value):.1e} |")


if __name__ == "__main__":
    main()
