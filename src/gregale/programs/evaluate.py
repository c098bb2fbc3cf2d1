"""`gregale eval`: the held-out loss of a trained model, on its own held-out text or on other files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gregale.data.build import NamedSource, build_store
from gregale.data.config import Corpus, prepare
from gregale.data.examples import Examples, held_out_examples
from gregale.data.sources.base import expand
from gregale.data.sources.text import TextSource
from gregale.data.stream import DocumentStream
from gregale.data.tokenizers import load_tokenizer
from gregale.programs.run.evaluation import Evaluator
from gregale.programs.run.trained import Trained, open_trained
from gregale.services.command import Command
from gregale.services.tracking.console import Console
from gregale.settings import Settings, whole


@dataclass(frozen=True)
class EvalOptions(Settings):
    """Options of the command."""

    run: str = field(metadata={"help": "the run: its directory, or its name under runs/"})
    data: list[str] = field(default_factory=list, metadata={"help": "text files (globs) to evaluate on instead"})
    step: int | None = field(
        default=None, metadata={"help": "the checkpoint's step; null: the newest", "range": whole(0)}
    )
    batches: int | None = field(default=None, metadata={"help": "batches to evaluate on; null: all", "range": whole(1)})
    json: bool = field(default=False, metadata={"help": "print the figures as JSON"})


def main(options: EvalOptions) -> int:
    """Prints the loss in nats a token and in bits a byte."""
    trained = open_trained(options.run, options.step, devices=None)
    with Console() as console:
        held_out = other_text(trained, options.data, console) if options.data else own_text(trained, console)
    tokenizer = load_tokenizer(trained.run.path)
    figures = Evaluator(trained.setup, held_out, tokenizer.token_bytes)(trained.model, options.batches)
    if options.json:
        print(json.dumps({"step": trained.step, **figures}))
    else:
        print(
            f"{trained.run.path} at step {trained.step}: held-out loss {figures['eval_loss']:.4f} nats a token, "
            f"{figures['bits_per_byte']:.4f} bits per byte"
        )
    return 0


def own_text(trained: Trained, console: Console) -> Examples:
    """What the run itself holds out."""
    config = trained.setup.config
    corpus: Corpus = prepare(config.data, config.batch.sequence_length, config.seed, console.progress)
    return corpus.held_out


def other_text(trained: Trained, files: list[str], console: Console) -> Examples:
    """All of the text in some files."""
    config = trained.setup.config
    source = NamedSource("data", TextSource(files=tuple(files)))
    tokenizer = load_tokenizer(trained.run.path)
    store = build_store(source, tokenizer, Path(expand(config.data.cache)), config.data.workers or 1, console.progress)
    everything = DocumentStream(store, np.ones(len(store.offsets) - 1, bool))
    return held_out_examples({"data": everything}, config.batch.sequence_length, config.data.cross_documents)


COMMAND = Command(main=main, options=EvalOptions, positional=("run",))
