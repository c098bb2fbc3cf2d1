"""`gregale eval`: the loss of a trained model on the text that its run evaluates on, or on other files."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from gregale.data.build import NamedSource, build_store
from gregale.data.config import prepare
from gregale.data.examples import validation_examples
from gregale.data.sources.text import TextSource
from gregale.data.split import split_at
from gregale.data.tokenizers import load_tokenizer
from gregale.data.training_texts import naming
from gregale.errors import UserError
from gregale.programs.run.checkpointed import noted
from gregale.programs.run.evaluation import EvaluationText, Evaluator, evaluation_text, in_words
from gregale.programs.run.trained import Trained, open_trained
from gregale.services.command import Command
from gregale.services.tracking.console import Console
from gregale.services.tracking.tracker import finite
from gregale.settings import Settings, whole


@dataclass(frozen=True)
class EvalOptions(Settings):
    """Options of the command."""

    run: str = field(metadata={"help": "the run: its directory or URL, or its name under runs/"})
    data: list[str] = field(default_factory=list, metadata={"help": "text files (globs) to evaluate on instead"})
    step: int | None = field(
        default=None, metadata={"help": "the checkpoint's step; null: the newest", "range": whole(0)}
    )
    batches: int | None = field(
        default=None,
        metadata={
            "help": "batches of each text to evaluate on; null: the run's evaluation.batches, or all of --data",
            "range": whole(1),
        },
    )
    all: bool = field(default=False, metadata={"help": "evaluate on all batches, whatever evaluation.batches says"})
    json: bool = field(default=False, metadata={"help": "print the figures as JSON; all else goes to standard error"})

    def __post_init__(self):
        super().__post_init__()
        if self.all and self.batches is not None:
            raise UserError(f"all and batches {self.batches} are both given; leave one out.")


def main(options: EvalOptions) -> int:
    """Prints the loss in nats a token and in bits a byte."""
    trained = open_trained(options.run, options.step, devices=None)
    batches = options.batches
    if batches is None and not options.all and not options.data:
        batches = trained.setup.config.evaluation.batches
    tokenizer = load_tokenizer(trained.run.path)
    with Console(sys.stderr if options.json else None) as console, ExitStack() as stack:
        text = other_text(trained, options.data, console) if options.data else own_text(trained, console, stack)
        figures = Evaluator(trained.setup, text, tokenizer.token_bytes)(trained.model, batches)
    if options.json:
        print(json.dumps({"step": trained.step} | dict.fromkeys(figures) | finite(figures), allow_nan=False))
    else:
        words = in_words(figures, held_out=text.held_out is not None, bits_digits=4)
        print(f"{trained.run.path} at step {trained.step}: {words}")
    return 0


def own_text(trained: Trained, console: Console, stack: ExitStack) -> EvaluationText:
    """What the run itself is evaluated on; raises `UserError` if it is no longer what it was.

    - `stack`: its end closes the text
    """
    config, path = trained.setup.config, trained.run.path
    if not config.data.evaluates:
        raise UserError(
            f"{path} has no text to evaluate on: its data.held_out is 0 and it has no data.validation. Name some: "
            f"gregale eval {path} --data 'FILES'"
        )
    prepared = prepare(config.data, config.batch.sequence_length, config.seed, console.progress)
    corpus = stack.enter_context(closing(prepared))
    for note in corpus.notes:
        console.message(note)
    if corpus.fingerprint != noted(trained.metadata, "data"):
        raise UserError(changed("data.sources", trained))
    for name, found in corpus.validation_fingerprints.items():
        if found != trained.metadata.get("validation", {}).get(name, found):
            raise UserError(changed(f"data.validation.{name}", trained))
    return evaluation_text(corpus)


def changed(key: str, trained: Trained) -> str:
    """That a text is another now."""
    return (
        f"{key}: the text is not what it was when {trained.run.path} saved step {trained.step}: files, the tokenizer "
        f"or what is held out have changed. A loss on it could not be compared with the run's own, and might be one on "
        f"text that the run was trained on. Put the old text back, or name text to evaluate on: "
        f"gregale eval {trained.run.path} --data 'FILES'"
    )


def other_text(trained: Trained, files: list[str], console: Console) -> EvaluationText:
    """All of the text in some files."""
    config = trained.setup.config
    source = NamedSource("data", TextSource(files=tuple(files)))
    tokenizer = load_tokenizer(trained.run.path)
    cache, workers = config.data.token_cache(), config.data.workers or 1
    with naming("data"):
        store = build_store(source, tokenizer, cache, workers, console.progress)
        everything = split_at(store, 0, None).train
        return EvaluationText(
            validation_examples(everything, config.batch.sequence_length, config.data.cross_documents)
        )


COMMAND = Command(main=main, options=EvalOptions, positional=("run",))
