"""Provides the stages of a run, checked and with their data, before the run begins."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import jax

from gregale.axes.mesh import make_mesh
from gregale.axes.parameters import parameter_count
from gregale.axes.quantised_weight import is_quantised
from gregale.data.preparation import Corpus, prepare
from gregale.data.progress import Report
from gregale.data.tokenizer_training import naming
from gregale.data.tokenizers import fewest_tokens
from gregale.errors import UserError
from gregale.evaluation.tasks.files import read_tasks
from gregale.islands.stages import stage_rounds
from gregale.methods.island import Island
from gregale.methods.method import Method
from gregale.programs.runtime.setup import Setup, check_replicas, set_up
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import agree_on_text
from gregale.tracking.choices import check_installed
from gregale.training.stepper import Stepper


@dataclass(frozen=True)
class PreparedStage:
    """A stage whose configuration is checked, and whose data are ready.

    - `last`: the step after which the next stage begins, or the run ends
    """

    setup: Setup
    corpus: Corpus
    last: int

    @cached_property
    def _steppers(self) -> dict[str, Stepper]:
        return {}

    def stepper(self, method: Method) -> Stepper:
        """Return the programs of the steps of a method, the same ones for every call."""
        if method.name not in self._steppers:
            self._steppers[method.name] = self.setup.stepper(method)
        return self._steppers[method.name]


def naming_stage(number: int) -> AbstractContextManager[None]:
    """Return a block that adds the key of a stage to the message of its error; the first stage has no key."""
    return naming(f"stages.{number - 1}") if number else nullcontext()


def check_stages(config: TrainConfig) -> list[Setup]:
    """Return a setup of every stage, before the data are read; raise `UserError` for contradictory values."""
    setups = []
    for number, stage in enumerate(config.each_stage):
        with naming_stage(number):
            check_installed(stage.config.trackers)
            setups.append(stage_setup(stage.config, fewest_tokens(stage.config.data.tokenizer)))
            read_tasks(stage.config.evaluation.tasks)
    if config.islands.lighthouse is not None:
        stage_rounds(config, [setup.method for setup in setups if isinstance(setup.method, Island)])
    return setups


def stage_setup(config: TrainConfig, tokens: int) -> Setup:
    setup = set_up(config, tokens, make_mesh(config.mesh, jax.devices()[: config.cpu_devices]))
    if config.islands.lighthouse is None:
        check_replicas(config, setup.layout)
    return setup


def prepare_stages(config: TrainConfig, report: Report, say: Callable[[str], None]) -> tuple[PreparedStage, ...]:
    """Return all stages with their data, which every process has in common; the text is tokenized now."""
    found, corpora = [], corpora_of(config, report)
    for note in dict.fromkeys(note for corpus in corpora for note in corpus.notes):
        say(note)
    lasts = [stage.first for stage in config.each_stage[1:]] + [config.steps]
    for number, (stage, corpus, last) in enumerate(zip(config.each_stage, corpora, lasts, strict=True)):
        agree_on_text(corpus, read_tasks(stage.config.evaluation.tasks))
        with naming_stage(number):
            found.append(PreparedStage(stage_setup(stage.config, corpus.tokenizer.vocabulary_size), corpus, last))
    return tuple(found)


def corpora_of(config: TrainConfig, report: Report) -> list[Corpus]:
    """Return the corpus of each stage; stages with the same data share it."""
    found: list[Corpus] = []
    data = [(stage.config.data, stage.config.batch.sequence_length) for stage in config.each_stage]
    for number, each in enumerate(data):
        if number and each == data[number - 1]:
            found.append(found[-1])
            continue
        with naming_stage(number):
            found.append(prepare(*each, config.seed, report))
            check_cuts(found)
    return found


def check_cuts(corpora: Sequence[Corpus]) -> None:
    """Raise `UserError` if the last stage holds out another end of a source than the stage before it."""
    for name, cut in corpora[-1].cuts.items() if len(corpora) > 1 else ():
        if name in corpora[-2].train_rows and corpora[-2].cuts.get(name) != cut:
            raise UserError(
                f"batch.sequence_length: data.sources.{name} has few documents: its last rows are held out, and "
                "longer rows would be other text. Set data.held_out to 0, and name other text in data.validation."
            )


def describe(setup: Setup, corpus: Corpus) -> str:
    """Return the description of the run's model, devices, data and compiler options."""
    config = setup.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in setup.layout.mesh.shape.items() if size > 1)
    device = setup.layout.mesh.devices.flat[0]
    options = ", ".join(f"{name} {value}" for name, value in (setup.compiler_options or {}).items())
    frozen = sum(leaf.size for leaf in jax.tree.leaves(setup.frozen, is_leaf=is_quantised))
    beside = f"{' of adapters' if config.adapter is not None else ''}, {frozen:,} frozen ones," if frozen else ""
    rows = sum(len(each) * each.rows_together for each in corpus.train_rows.values())
    epochs = config.steps * config.batch.size / rows
    held_out = f"{corpus.held_out_tokens:,} tokens held out" if corpus.held_out_tokens else "nothing held out"
    validation = [f"{len(each):,} tokens of {name} to evaluate on" for name, each in corpus.validation_streams.items()]
    return (
        f"{config.name}: {parameter_count(setup.model):,} parameters{beside} on {setup.layout.mesh.size} "
        f"{device.device_kind} device(s){f' ({mesh})' if mesh else ''}; {config.steps:,} steps of "
        f"{config.batch.tokens:,} tokens, {epochs:.2f} epochs of {corpus.training_tokens:,} tokens; "
        f"{', '.join([held_out, *validation])}"
        f"{f'; compiler options: {options}' if options else ''}"
    )
