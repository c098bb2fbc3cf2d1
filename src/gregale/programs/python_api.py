"""Provides `gregale.train` and `gregale.load`: training and the model of a run for Python and notebooks.

The model has samples and losses, as `gregale sample` and `gregale eval` have them.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import draccus
import jax
import numpy as np

from gregale.axes.layout import MeshConfig
from gregale.data.examples import stream_of
from gregale.data.tokenizers import load_tokenizer
from gregale.distributed.signals import process_goes_on
from gregale.errors import Interrupted, UserError
from gregale.huggingface.hub import resolved
from gregale.programs.evaluate import EvalOptions, measured
from gregale.programs.runtime.evaluation import SlidingEvaluation, start_of
from gregale.programs.runtime.sampler import Sampler, beside_training, text_format_of
from gregale.programs.runtime.trained_model import Trained, open_trained
from gregale.programs.sample import SampleOptions, check_length, context_of
from gregale.programs.train.command import TrainOptions, main
from gregale.runs.config import TrainConfig
from gregale.runs.history import RunPaths, last_entries
from gregale.runs.parsing import load as read
from gregale.settings.decoding import TYPE, choice_name, is_registry
from gregale.storage import StoragePath
from gregale.tracking.trackers import Console


class LoadedModel:
    """The model of a run or of `gregale import`, in the memory of this process's devices.

    - `run`: the run directory
    - `config`: the run's configuration, a `TrainConfig`
    - `step`: the step of the checkpoint; 0 for an imported model
    - `model`: the parameters, an Equinox module whose arrays have named axes
    - `tokenizer`: has `encode`, `decode` and `vocabulary_size`
    """

    def __init__(self, trained: Trained):
        self.run, self.step, self.model = trained.run.path, trained.step, trained.model
        self.config = trained.run.config_at(trained.step)
        self.tokenizer = load_tokenizer(self.run)
        self._trained = trained

    def sample(
        self,
        prompts: str | Sequence[str] = "",
        tokens: int = 256,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str | list[str]:
        """Return the continuation of a prompt, or a list with that of each prompt; the options of `gregale sample`.

        Arguments:
        - `tokens`: the most tokens of a continuation
        - `stop`: strings that end a continuation, which does not contain them

        Raises `UserError` for a prompt that is longer than the model's context, and for an option out of its range.
        """
        options = SampleOptions(temperature, top_k, top_p, seed, run=str(self.run), tokens=tokens, stop=listed(stop))
        asked, context = listed(prompts), context_of(self._trained.run)
        for number, prompt in enumerate(asked):
            source = "the prompt" if isinstance(prompts, str) else f"prompts[{number}]"
            check_length(source, len(self._form.ids(prompt)), context)
        sampler, model = self._sampler
        texts = sampler.texts(model, asked, tokens, options.sampling, options.stop) if asked else []
        return texts[0] if isinstance(prompts, str) else texts

    def loss(self, texts: str | Sequence[str]) -> float:
        """Return the mean loss of texts in nats per token; each text is a document.

        Each token is scored once, given the tokens before it in windows of the model's context, as by `gregale eval
        --stride CONTEXT`. Raises `UserError` without text.
        """
        given = [text for text in listed(texts) if text]
        if not given:
            raise UserError("loss: there is no text; give at least one that is not empty.")
        setup, start = self._trained.setup, start_of(self._trained.run, self.tokenizer)
        evaluation = SlidingEvaluation(setup, self.tokenizer, setup.config.batch.sequence_length, start)
        documents = evaluation(self.model, {"": [stream_of(given, self.tokenizer)]})[""]
        return documents.metrics()["eval_loss"]

    def evaluate(
        self,
        files: str | Sequence[str] = (),
        *,
        tasks: str | Sequence[str] = (),
        batches: int | None = None,
        stride: int | None = None,
    ) -> dict[str, float]:
        """Return the metrics of `gregale eval --json`: `eval_loss` in nats per token, `bits_per_byte`, and of tasks.

        Arguments:
        - `files`, `tasks`: patterns of files with text, and of files with tasks; without both, the run's own
        - `batches`: the most batches of each text; None: `evaluation.batches` of the run, or all of `files`
        - `stride`: tokens that a sliding window scores; None: windows do not overlap, as in training

        Raises `UserError` as the command does.
        """
        options = EvalOptions(str(self.run), listed(files), listed(tasks), batches=batches, stride=stride)
        with Console(sys.stderr) as console:
            return measured(self._trained, options, console).metrics

    @cached_property
    def _form(self):
        return text_format_of(self._trained.run, self.tokenizer)

    @cached_property
    def _sampler(self) -> tuple[Sampler, object]:
        """Return the sampler, and the model on its devices."""
        sampler = Sampler(self._trained.setup, self._form, beside_training(self._trained.setup))
        return sampler, sampler.prepared(self.model)


def listed(texts: str | Sequence[str]) -> list[str]:
    """Return texts as a list; one text is a list of itself."""
    return [texts] if isinstance(texts, str) else list(texts)


@dataclass(frozen=True)
class TrainingResult:
    """The result of `gregale.train`.

    - `run`: the run directory
    - `steps`: the steps done, with those of earlier calls; the newest checkpoint has their state
    - `is_complete`: whether these are all steps, or a callback has ended the run; False after an interrupt
    - `evaluation`: the metrics of the last evaluation, such as `eval_loss`; empty without one
    """

    run: StoragePath
    steps: int
    is_complete: bool
    evaluation: dict[str, float]


def train(
    config: TrainConfig | Mapping[str, Any] | str | PathLike[str],
    overrides: str | Sequence[str] = (),
    *,
    fresh: bool = False,
    stage: int | None = None,
    profile: str | None = None,
    **keys: Any,
) -> TrainingResult:
    """Train as `gregale train` does: with the same checks, files, resuming and output.

    Arguments:
    - `config`: the path of a YAML file, a mapping with its keys, or a `TrainConfig`
    - `overrides`: arguments of the command: `["--optimizer.learning_rate", "1e-3"]`
    - `keys`: keys of the first level, in place of those of `config`: `steps=100`; a mapping changes the keys in it
    - `fresh`, `stage`, `profile`: options of the command

    An interrupt or SIGTERM ends the call after the present step, with a checkpoint; a second interrupt raises
    KeyboardInterrupt. Before the first step of the call it ends without a checkpoint; one of several processes raises
    KeyboardInterrupt there. Outside of the main thread no signal is caught. Each process of a run of several makes this
    call.

    Raises `UserError` with the message of the command, which would end with it.
    """
    overrides = shlex.split(overrides) if isinstance(overrides, str) else overrides
    given = str(config) if isinstance(config, str | PathLike) else _plain(config)
    chosen = resolved(read(TrainConfig, given, overrides, _plain(keys)))
    with process_goes_on():
        try:
            code = main(TrainOptions(fresh=fresh, stage=stage, profile=profile), chosen)
        except Interrupted as error:
            if jax.process_count() > 1:  # the others lose this process, which has to end
                raise
            (code,) = error.args
    run = RunPaths(chosen.folder)
    _, evaluation, _ = last_entries(run.metrics)
    metrics = {name: value for name, value in evaluation.items() if name != "step"}
    return TrainingResult(run.path, run.saved().step or 0, code == 0, metrics)


def load(
    run: str | StoragePath,
    step: int | None = None,
    devices: int | MeshConfig | None = None,
    average: bool = False,
) -> LoadedModel:
    """Return the trained model of a run, or an imported model.

    Arguments:
    - `run`: its directory or URL, or its name under runs/
    - `step`: the checkpoint's step; None: the newest valid checkpoint
    - `devices`: their number, or their mesh; None: the run's own mesh
    - `average`: with the average of the parameters, which the run's `average` keeps

    Raises `UserError` if there is no such run, checkpoint or average, or if the devices do not suffice.
    """
    return LoadedModel(open_trained(str(run), step, devices, average))


def _plain(value: Any) -> Any:
    """Return a value as YAML has it: mappings, lists, numbers and texts in place of Python's objects."""
    if is_dataclass(value):
        kind = {TYPE: choice_name(type(value), value)} if is_registry(type(value)) else {}
        return kind | draccus.encode(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PathLike) else value
