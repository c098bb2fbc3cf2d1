"""Provides `gregale eval`, which evaluates a trained model on its run's evaluation text, on other text and on tasks."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gregale.data.build import NamedSource, build_store
from gregale.data.examples import DocumentStream, rows_of, split_at, validation_examples
from gregale.data.preparation import Corpus, notes_on, prepare, token_cache
from gregale.data.sources import base
from gregale.data.sources.base import FileSource
from gregale.data.sources.tables import ParquetSource
from gregale.data.sources.text import CsvSource, JsonLinesSource, TextSource, TsvSource
from gregale.data.tokenizer_training import naming
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.distributed.signals import stop_on_signals
from gregale.errors import UserError
from gregale.evaluation.tasks import Task, read_tasks
from gregale.programs.command import Command
from gregale.programs.runtime.evaluation import (
    Documents,
    EvaluationText,
    Evaluator,
    SlidingEvaluation,
    evaluation_on,
    evaluation_text,
    format_losses,
    format_metrics,
    start_of,
    task_metrics,
)
from gregale.programs.runtime.trained_model import AVERAGE, Trained, mixtures_of, newer_masks, open_trained, recorded
from gregale.settings import Settings, setting, whole
from gregale.streams import say
from gregale.terminal import Console as Terminal
from gregale.terminal import print_table
from gregale.tracking.callback import finite
from gregale.tracking.trackers import Console

KINDS = {".jsonl": JsonLinesSource, ".parquet": ParquetSource, ".csv": CsvSource, ".tsv": TsvSource}


@dataclass(frozen=True)
class EvalOptions(Settings):
    """Options of the command. Without `data` and `tasks` the command uses the run's own text and tasks."""

    run: str = field(metadata={"help": "the run: its directory or URL, or its name under runs/"})
    data: list[str] = setting(
        list,
        "files (globs) to evaluate on: text, or the field text of .jsonl, .parquet, .csv and .tsv",
        aliases=("text", "file", "files"),
    )
    tasks: list[str] = setting(list, "files of tasks (globs) to score, or NAME:FILES of a published task")
    parse_special: bool = setting(False, "encode names of special tokens in tasks as special tokens, not as text")
    chat: bool = setting(False, "a prompt of a task whose answer is generated is the message of a user")
    stride: int | None = setting(
        None,
        "the number of tokens that a sliding window scores; null: windows do not overlap, as in training",
        range=whole(1),
    )
    step: int | None = setting(None, "the checkpoint's step; null: the newest checkpoint", range=whole(0))
    average: bool = setting(False, AVERAGE)
    batches: int | None = setting(
        None,
        "the number of batches of each text; null: the run's evaluation.batches, or all of --data",
        range=whole(1),
        aliases=("limit", "max_batches"),
    )
    all: bool = setting(False, "evaluate on all batches, whatever evaluation.batches says")
    json: bool = setting(False, "print the metrics as JSON; notes go to standard error")

    def __post_init__(self):
        super().__post_init__()
        if self.all and self.batches is not None:
            raise UserError(f"all and batches {self.batches} are both given; leave one out.")
        if self.stride is not None and self.batches is not None:
            raise UserError(
                f"stride {self.stride} and batches {self.batches} are both given, but sliding windows go over all of "
                "the text; leave one out."
            )
        if self.tasks and not self.data and self.is_about_text:
            raise UserError("stride, batches and all are about text, and only tasks are named; name --data too.")

    @property
    def is_about_text(self) -> bool:
        """Return whether an option applies to text only."""
        return self.stride is not None or self.batches is not None or self.all


@stop_on_signals()
def main(options: EvalOptions) -> int:
    """Print the loss in nats per token and bits per byte, and the metrics of tasks."""
    read_tasks(options.tasks)  # rejects wrong files before the model is read
    trained = open_trained(options.run, options.step, None, options.average)
    with Console(sys.stderr if options.json else None) as console:
        found = measured(trained, options, console)
    if options.json:
        metrics = found.metrics
        print(json.dumps({"step": trained.step} | dict.fromkeys(metrics) | finite(metrics), allow_nan=False))
    else:
        print_metrics(f"{trained.run.path} at step {trained.step}", found)
    return 0


@dataclass(frozen=True)
class Measured:
    """The metrics of text and of tasks; `words` is a sentence about those of text."""

    of_text: dict[str, float]
    words: str
    tasks: Sequence[Task]
    of_tasks: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        return self.of_text | self.of_tasks


def measured(trained: Trained, options: EvalOptions, console: Console) -> Measured:
    """Return the metrics of a model on the text and the tasks of the options, or on the run's own."""
    config = trained.setup.config
    names_nothing = not (options.data or options.tasks)
    tasks = read_tasks(config.evaluation.tasks if names_nothing else options.tasks)
    tokenizer = load_tokenizer(trained.run.path)
    metrics, words, scored = {}, "", {}
    # Before the text is evaluated, because it rejects questions that cannot be scored.
    evaluation = None
    if tasks:
        parses = options.parse_special or (names_nothing and config.evaluation.parse_special)
        of_tasks = tokenizer.parsing_special() if parses else tokenizer
        chat = options.chat or (names_nothing and config.evaluation.chat)
        evaluation = evaluation_on(tasks, trained.setup, of_tasks, trained.run, console.message, chat)
    if options.data or (names_nothing and (config.data.evaluates or not tasks or options.is_about_text)):
        text = other_text(trained, options.data, console) if options.data else own_text(trained, console)
        metrics, words = text_metrics(trained, text, tokenizer, options, console)
    if evaluation is not None:
        scored = evaluation(trained.model, lambda done, total: console.progress("tasks", done, total, "texts"))
    return Measured(metrics, words, tasks, scored)


@dataclass(frozen=True)
class Text:
    """Text for an evaluation.

    - `windows()`: windows that do not overlap, as in training; raises `UserError` for a text shorter than a window
    - `streams`: the same text for sliding windows, by validation source; other text has the name ""
    """

    windows: Callable[[], EvaluationText]
    streams: Mapping[str, Sequence[DocumentStream]]


def text_metrics(
    trained: Trained, text: Text, tokenizer: Tokenizer, options: EvalOptions, console: Console
) -> tuple[dict[str, float], str]:
    """Return the metrics of text, and a sentence that reports them."""
    if options.stride is not None:
        evaluation = SlidingEvaluation(trained.setup, tokenizer, options.stride, start_of(trained.run, tokenizer))
        found = evaluation(
            trained.model, text.streams, lambda done, total: console.progress("windows", done, total, "windows")
        )
        whole = found.pop("") if "" in found else Documents.joined(list(found.values()))
        metrics = whole.metrics()
        for name, documents in found.items():
            metrics |= {f"{metric}.{name}": value for metric, value in documents.metrics().items()}
        return metrics, format_metrics(metrics)
    batches = options.batches
    if batches is None and not options.all and not options.data:
        batches = trained.setup.config.evaluation.batches
    windows = text.windows()
    evaluator = Evaluator(trained.setup, windows, tokenizer.token_bytes)
    frozen = trained.frozen() if evaluator.objective.needs_reference else None
    metrics = evaluator(trained.model, batches, frozen=frozen)
    return metrics, format_losses(metrics, held_out=windows.held_out is not None, bits_digits=4)


def print_metrics(what: str, measured: Measured) -> None:
    """Print the metrics of text in a line and those of tasks in a table."""
    if measured.words:
        say(f"{what}: {measured.words}")
    if measured.tasks:
        found = task_metrics(measured.of_tasks)
        names = list(dict.fromkeys(metric for its in found.values() for metric in its))
        rows = [
            [task.name, f"{len(task.questions):,}", *(found[task.name].get(name, "") for name in names)]
            for task in measured.tasks
        ]
        headings = ["task", "questions", *names]
        print_table(Terminal(), f"{what}, ± the standard error", headings, rows)


def own_text(trained: Trained, console: Console) -> Text:
    """Return the run's own evaluation text; raise `UserError` if the text has changed since the checkpoint."""
    corpus = own_corpus(trained, console)
    streams: dict[str, Sequence[DocumentStream]] = {name: [each] for name, each in corpus.validation_streams.items()}
    if corpus.held_out is not None:
        streams = {"": list(corpus.held_out_streams.values()), **streams}
    return Text(lambda: evaluation_text(corpus, trained.setup.config), streams)


def own_corpus(trained: Trained, console: Console) -> Corpus:
    """Return the run's data; raise `UserError` if they have changed since the checkpoint."""
    config, path = trained.setup.config, trained.run.path
    if not config.data.evaluates:
        raise UserError(
            f"{path} has no text to evaluate on: its data.held_out is 0 and it has no data.validation. Name some: "
            f"gregale eval {path} --data 'FILES'"
        )
    corpus = prepare(config.data, config.batch.sequence_length, config.seed, console.progress)
    for note in corpus.notes:
        console.message(note)
    mixtures = mixtures_of(trained.metadata, config)
    if corpus.fingerprint_after(mixtures) != recorded(trained.metadata, "data"):
        raise UserError(changed("data.sources", trained, corpus))
    for name, found in corpus.validation_fingerprints.items():
        if found != trained.metadata.get("validation", {}).get(name, found):
            raise UserError(changed(f"data.validation.{name}", trained, corpus))
    return corpus


def changed(key: str, trained: Trained, corpus: Corpus) -> str:
    """Return the message about a text, or rules for its tokens, that have changed since the checkpoint."""
    path, newer = trained.run.path, newer_masks(trained.metadata, corpus)
    why = newer or (
        f"the text is not what it was when {path} saved step {trained.step}: files, the tokenizer or what is held out "
        "have changed"
    )
    remedy = "Train the run again with --fresh" if newer else "Put the old text back"
    return (
        f"{key}: {why}. A loss on it could not be compared with the run's own, and might be one on text that the run "
        f"was trained on. {remedy}, or name text to evaluate on: gregale eval {path} --data 'FILES'"
    )


def other_text(trained: Trained, files: list[str], console: Console) -> Text:
    config = trained.setup.config
    tokenizer = load_tokenizer(trained.run.path)
    cache, workers = token_cache(config.data), config.data.workers or 1
    source = source_of(files)
    with naming("data"):
        store = build_store(NamedSource("data", source), tokenizer, cache, workers, console.progress)
    for note in notes_on("data", store):
        console.message(note)
    everything = split_at(store, 0, None).train

    def windows() -> EvaluationText:
        with naming("data"):
            length, packing = config.batch.sequence_length, config.data.packing_of(source)
            return EvaluationText(validation_examples(rows_of(everything, length, packing, evaluates=True)))

    return Text(windows, {"": [everything]})


def source_of(files: list[str]) -> FileSource:
    """Return the source for these file name endings; raise `UserError` for files of several kinds."""
    paths = [PurePath(file) for file in files]
    endings = [path.with_suffix("").suffix if path.suffix in base.ENDINGS else path.suffix for path in paths]
    kinds = {KINDS.get(ending, TextSource) for ending in endings}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.get_choice_name(kind) for kind in kinds))
        raise UserError(f"the files are of several kinds: {names}. Evaluate on one kind after the other.")
    return kinds.pop()(files=tuple(files))


COMMAND = Command(main=main, options=EvalOptions, plugins=True, positional=("run",))
