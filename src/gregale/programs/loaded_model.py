"""Provides the model of a run for Python: samples and losses, as `gregale sample` and `gregale eval` have them."""

import sys
from collections.abc import Sequence
from functools import cached_property

from gregale.data.examples import stream_of
from gregale.data.tokenizers import load_tokenizer
from gregale.errors import UserError
from gregale.programs.evaluate import EvalOptions, measured
from gregale.programs.runtime.evaluation import SlidingEvaluation, start_of
from gregale.programs.runtime.sampler import Sampler, beside_training, text_format_of
from gregale.programs.runtime.trained_model import Trained
from gregale.programs.sample import SampleOptions, check_length, context_of
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
