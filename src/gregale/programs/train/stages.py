"""Provides the stages of a run, checked and with their data, before the first of them begins."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from gregale.axes.mesh import make_mesh
from gregale.data.preparation import Corpus, prepare
from gregale.data.progress import Report
from gregale.data.tokenizers import fewest_tokens
from gregale.errors import UserError
from gregale.evaluation.tasks.files import Task, read_tasks
from gregale.programs.runtime.setup import Setup, check_replicas, set_up
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import agree_on_text
from gregale.tracking.choices import check_installed


@dataclass(frozen=True)
class PreparedStage:
    """A stage whose configuration is checked, and whose data are ready.

    - `last`: the step after which the next stage begins, or the run ends
    """

    setup: Setup
    corpus: Corpus
    last: int


@contextmanager
def naming_stage(number: int) -> Iterator[None]:
    """Add the key of a stage to the message of its error; the first stage has no key."""
    try:
        yield
    except UserError as error:
        raise error if number == 0 else UserError(f"stages.{number - 1}: {error}") from None


def check_stages(config: TrainConfig) -> tuple[list[Setup], list[list[Task]]]:
    """Return a setup and the tasks of every stage, before the data are read.

    Raises `UserError` for contradictory values.
    """
    setups, tasks = [], []
    for number, stage in enumerate(config.each_stage):
        with naming_stage(number):
            check_installed(stage.config.trackers)
            setups.append(stage_setup(stage.config, fewest_tokens(stage.config.data.tokenizer)))
            tasks.append(list(read_tasks(stage.config.evaluation.tasks)))
    return setups, tasks


def stage_setup(config: TrainConfig, tokens: int) -> Setup:
    setup = set_up(config, tokens, make_mesh(config.mesh, jax.devices()[: config.cpu_devices]))
    if config.islands.lighthouse is None:
        check_replicas(config, setup.layout)
    return setup


def prepare_stages(
    config: TrainConfig, tasks: Sequence[Sequence[Task]], report: Report, say: Callable[[str], None]
) -> tuple[PreparedStage, ...]:
    """Return all stages with their data, which every process has in common; the text is tokenized now."""
    found: list[PreparedStage] = []
    lasts = [stage.first for stage in config.each_stage[1:]] + [config.steps]
    corpora = corpora_of(config, report)
    said: set[str] = set()
    for number, (stage, corpus, last) in enumerate(zip(config.each_stage, corpora, lasts, strict=True)):
        agree_on_text(corpus, tasks[number])
        for note in corpus.notes:
            if note not in said:
                say(note)
        said.update(corpus.notes)
        with naming_stage(number):
            found.append(PreparedStage(stage_setup(stage.config, corpus.tokenizer.vocabulary_size), corpus, last))
    return tuple(found)


def corpora_of(config: TrainConfig, report: Report) -> list[Corpus]:
    """Return the corpus of each stage; stages with the same data share it."""
    found: list[Corpus] = []
    before = None
    for number, stage in enumerate(config.each_stage):
        data = stage.config.data, stage.config.batch.sequence_length
        if data == before:
            found.append(found[-1])
        else:
            with naming_stage(number):
                found.append(prepare(*data, config.seed, report))
        before = data
    return found
