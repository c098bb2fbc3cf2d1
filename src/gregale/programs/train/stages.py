"""Provides the stages of a run, checked and with their data, before the run begins."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import jax

from gregale.axes.layout import make_mesh, with_shardings
from gregale.axes.parameters import is_quantised, parameter_count
from gregale.data.preparation import Corpus, prepare
from gregale.data.store import Report
from gregale.data.tokenizer_training import naming
from gregale.data.tokenizers import fewest_tokens
from gregale.errors import UserError
from gregale.evaluation.tasks import read_tasks
from gregale.huggingface.config import exported_family
from gregale.methods.method import Method
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.evaluation import Evaluator, evaluation_text
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import decoder_of, reads_average
from gregale.programs.train.step_log import is_due
from gregale.runs.config import TrainConfig
from gregale.runs.process_agreement import agree_on_text
from gregale.runs.rules import check
from gregale.settings import TRAINING
from gregale.tracking.trackers import check_installed
from gregale.training.state import Stepper, abstract_state, eval_model

OF_A_STEP, OF_AN_EVALUATION = "a step", "an evaluation"
FIRST_STEPS = 10_000  # of a stage, in which its programs are looked for


@dataclass(frozen=True)
class PreparedStage:
    """A stage whose configuration is checked, and whose data are ready.

    - `last`: the step after which the next stage begins, or the run ends
    """

    setup: Setup
    corpus: Corpus
    last: int

    @cached_property
    def _programs(self) -> dict[str, tuple[Stepper, Callable[..., Any]]]:
        return {}

    def _of(self, method: Method) -> tuple[Stepper, Callable[..., Any]]:
        if method.name not in self._programs:
            trained = jax.jit(partial(eval_model, method), compiler_options=self.setup.compiler_options)
            self._programs[method.name] = self.setup.stepper(method), trained
        return self._programs[method.name]

    def stepper(self, method: Method) -> Stepper:
        """Return the programs of the steps of a method, the same ones for every call."""
        return self._of(method)[0]

    def trained(self, method: Method) -> Callable[..., Any]:
        """Return the program from a state of the method, and an average or None, to the model to evaluate.

        It is the same one for every call.
        """
        return self._of(method)[1]

    @cached_property
    def evaluator(self) -> Evaluator | None:
        """Return the programs of the loss on text; None without text to evaluate on."""
        text = evaluation_text(self.corpus, self.setup.config)
        return Evaluator(self.setup, text, self.corpus.tokenizer.token_bytes) if text.first else None

    def compilations(self, first: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what each program of a stage that begins after `first` steps is of, and a function that compiles it.

        It is compiled from shapes alone, and its calls find it compiled.
        """
        setup, warm = self.setup, self.setup.config.sync.warm_up()
        begin, end = first + 1, self.last + 1
        parts = (setup.psdp, range(begin, min(end, warm + 1))), (setup.method, range(max(begin, warm + 1), end))
        for method, steps in parts:
            if steps:
                state, batch = abstract_state(method, setup.model), setup.abstract_batch
                programs = self.stepper(method).compilations(state, batch, steps[:FIRST_STEPS])
                yield from zip(repeat(OF_A_STEP), programs)
                yield from zip(repeat(OF_AN_EVALUATION), self.evaluations(method, steps))

    def evaluations(self, method: Method, steps: range) -> Iterator[Callable[[], Any]]:
        """Yield functions that compile the programs of the loss on text after these steps, as `compilations`."""
        every = self.setup.config.evaluation.every
        ends = bool(steps) and steps[-1] == self.setup.config.steps
        if self.evaluator is None or not (ends or any(is_due(step, every) for step in steps)):
            return
        state, program = abstract_state(method, self.setup.model), self.trained(method)
        given = state.method, state.average if reads_average(self.setup) else None
        compiled = program.lower(*given).compile()
        yield lambda: compiled
        model = with_shardings(jax.eval_shape(program, *given), compiled.output_shardings)
        yield from self.evaluator.compilations(*self.setup.holding(model, state.frozen))


def naming_stage(number: int) -> AbstractContextManager[None]:
    """Return a block that adds the key of a stage to the message of its error; the first stage has no key."""
    return naming(f"stages.{number - 1}") if number else nullcontext()


def check_stages(config: TrainConfig) -> list[Setup]:
    """Return a setup of every stage, before the data are read; raise `UserError` for contradictory values."""
    setups = []
    for number, stage in enumerate(config.each_stage):
        with naming_stage(number):
            check_installed(stage.config.trackers)
            setup = stage_setup(stage.config, fewest_tokens(stage.config.data.tokenizer))
            if config.export.every is not None:  # rejects a model that transformers does not have
                exported_family(setup.base, decoder_of(stage.config.model), setup.Vocab, {})
            setups.append(setup)
            read_tasks(stage.config.evaluation.tasks)
    config.fleet.check_stages(config, [setup.method for setup in setups])
    return setups


def stage_setup(config: TrainConfig, tokens: int) -> Setup:
    setup = set_up(config, tokens, make_mesh(config.mesh, jax.devices()[: config.cpu_devices]))
    if not config.fleet.joins:
        check(config, setup.layout, TRAINING)
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
