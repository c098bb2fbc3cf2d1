"""Provides a model's metrics on tasks, for a run and for `gregale eval`."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gregale.checkpoint.multihost import messages_of_all
from gregale.data.tokenizers import Tokenizer, counter_of_names, taken_as_text
from gregale.errors import UserError
from gregale.evaluation.tasks import Pair, Question, Score, Task, encoded, read_tasks
from gregale.inference.generate import Sampling
from gregale.programs.runtime.scoring import Scorer
from gregale.programs.runtime.setup import Setup
from gregale.programs.sample.chat import chat_prompts
from gregale.programs.sample.sampler import MAX_BATCH, Sampler, beside_training
from gregale.programs.sample.text_format import TextFormat
from gregale.runs.run_directory import RunDirectory

ERROR = "_stderr"
ANSWER = 256  # tokens of a generated answer at most


class Prompts(NamedTuple):
    """What a model is asked in a task: the tokens of each question's prompt, and the texts that end an answer."""

    task: Task
    prompts: list[list[int]]
    stops: list[str]


@dataclass(frozen=True)
class Asked:
    """The prompts of all tasks with generated answers.

    - `form`: its `ends` end an answer
    """

    form: TextFormat
    prompts: tuple[Prompts, ...] = ()


class TaskEvaluation:
    """Computes the metrics of tasks; encodes their text once and scores equal texts once.

    - `start`: tokens before each context
    - `asked`: of the tasks whose answers are generated

    Raises `UserError` for a question that cannot be scored, and if the files of the run's processes differ.
    """

    def __init__(self, setup: Setup, tasks: Sequence[Task], tokenizer: Tokenizer, start: Sequence[int], asked: "Asked"):
        self._tasks = [task for task in tasks if not task.generates]
        self._asked = asked
        if asked.prompts:
            self._sampler = Sampler(setup, asked.form, beside_training(setup))
        places: dict[Pair, str] = {}
        for question in (question for task in self._tasks for question in task.questions):
            for pair in question.pairs:
                places.setdefault(pair, question.place)
        self._numbers = {pair: number for number, pair in enumerate(places)}
        self._continuations = encoded(list(places), tokenizer, start)
        self._scorer = Scorer(setup, tokenizer)
        for place, continuation in zip(places.values(), self._continuations, strict=True):
            check_scored(place, continuation.scored, self._scorer.context)
        tokens = hashlib.sha256(b"".join(each.tokens.tobytes() for each in self._continuations))
        tokens.update(repr([(each.task.questions, each.prompts) for each in asked.prompts]).encode())
        if len(set(messages_of_all(tokens.hexdigest()))) > 1:
            raise UserError("evaluation.tasks: the files are not the same on all hosts of the run. Copy them anew.")

    def __call__(self, model, at_batch: Callable[[int, int], None] = lambda done, total: None) -> dict[str, float]:
        """Return the metrics of all tasks, `acc.NAME` and so on, each with its standard error, `acc_stderr.NAME`.

        - `at_batch(done, total)`: called for each batch
        """
        found = self._scorer(model, self._continuations, at_batch)
        metrics = self._of_answers(model, at_batch)
        for task in self._tasks:
            numbers = [[self._numbers[pair] for pair in question.pairs] for question in task.questions]
            scores = [Score(found.log_likelihoods[its], found.greedy[its]) for its in numbers]
            metrics |= {f"{metric}.{task.name}": value for metric, value in task.metrics(scores).items()}
        return metrics

    def _of_answers(self, model, at_batch: Callable[[int, int], None]) -> dict[str, float]:
        """Return the metrics of the tasks whose answers a model generates, the likeliest token each time."""
        if not self._asked.prompts:
            return {}
        ready, metrics = self._sampler.prepared(model), {}
        total, done = sum(len(prompts) for _, prompts, _ in self._asked.prompts), 0
        for task, prompts, stops in self._asked.prompts:
            answers = []
            for first in range(0, len(prompts), MAX_BATCH):
                batch, at_block = prompts[first : first + MAX_BATCH], partial(at_batch, done + first, total)
                answers += self._sampler.texts(ready, batch, ANSWER, Sampling(temperature=0), stops, at_block)
            done += len(answers)
            metrics |= {f"{name}.{task.name}": value for name, value in task.metrics_of_answers(answers).items()}
        at_batch(total, total)
        return metrics

    @property
    def cut(self) -> dict[str, int]:
        """Return by task the number of questions that are longer than the model's context."""
        is_cut = self._continuations.lengths > self._scorer.context
        return {
            task.name: sum(any(is_cut[self._numbers[pair]] for pair in each.pairs) for each in task.questions)
            for task in self._tasks
        }


def check_scored(place: str, scored: int, context: int) -> None:
    """Raise `UserError` for a continuation that is empty or longer than the context."""
    if not scored:
        raise UserError(
            f"{place}: nothing is left to score: a choice or answer is empty, or the tokenizer makes one token of it "
            "and the end of the context. A space between them helps (`delimiter`)."
        )
    if scored > context:
        raise UserError(
            f"{place}: a choice or answer has {scored:,} tokens, and the model's context (batch.sequence_length) "
            f"{context:,}. Shorten it, or leave it out."
        )


def asked_in(tasks: Sequence[Task], run: RunDirectory, form: TextFormat, chat: bool) -> Asked:
    """Return the prompts of the tasks whose answers are generated.

    - `chat`: a context is the message of a user. So it is in a file that has a conversation

    The end of the turn ends an answer in a conversation. Raises `UserError` for one that the template rejects.
    """
    generated = [task for task in tasks if task.generates]
    talking = {task.name for task in generated if chat or any(each.conversation for each in task.questions)}
    with chat_prompts(run, form.tokenizer) if talking else nullcontext() as chats:

        def prompts_of(task: Task) -> Prompts:
            if chats is None or task.name not in talking:
                return Prompts(task, [form.ids(each.prompt) for each in task.questions], [task.form.stop])
            return Prompts(task, [chats.ids(conversation_of(each), each.place) for each in task.questions], [])

        return Asked(form if chats is None else chats.form, tuple(map(prompts_of, generated)))


def conversation_of(question: Question) -> dict[str, Any]:
    return question.conversation or {"messages": [{"role": "user", "content": question.prompt}]}


def start_of(run: RunDirectory, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens before each text: those that an imported model's tokenizer adds, else none."""
    return tokenizer.start if run.huggingface.is_dir() else ()


def tasks_of(
    setup: Setup, tokenizer: Tokenizer, run: RunDirectory, report: Callable[[str], None]
) -> TaskEvaluation | None:
    """Return the evaluation of a run's configured tasks, None without tasks; report truncated questions."""
    found = read_tasks(setup.config.evaluation.tasks)
    if found and setup.config.evaluation.parse_special:
        tokenizer = tokenizer.parsing_special()
    return evaluation_on(found, setup, tokenizer, run, report, setup.config.evaluation.chat) if found else None


def evaluation_on(
    tasks: Sequence[Task],
    setup: Setup,
    tokenizer: Tokenizer,
    run: RunDirectory,
    report: Callable[[str], None],
    chat: bool,
) -> TaskEvaluation:
    """Return the evaluation on tasks; report the number of questions that are longer than the context.

    - `chat`: see `asked_in`

    Also report the names of special tokens that the tasks have as plain text.
    """
    questions = [question for task in tasks for question in task.questions]
    texts = ["".join(pair) for question in questions for pair in question.pairs]
    texts += [question.prompt for question in questions]
    if note := taken_as_text(counter_of_names(tokenizer)(texts), "the tasks", "parse_special"):
        report(note)
    start = start_of(run, tokenizer)
    asked = asked_in(tasks, run, TextFormat(tokenizer, start), chat)
    evaluation = TaskEvaluation(setup, tasks, tokenizer, start, asked)
    for task in tasks:
        if count := evaluation.cut.get(task.name):
            total = f"{count:,} of {len(task.questions):,}"
            report(f"{task.name}: questions longer than the model's context, which are cut on the left: {total}.")
    return evaluation


def format_tasks(metrics: Mapping[str, float | None]) -> str:
    """Return the metrics of tasks in a line; empty if there are none."""
    sentences = [
        f"{task} {', '.join(f'{metric} {words}' for metric, words in its.items())}"
        for task, its in task_metrics(metrics).items()
    ]
    return f"tasks: {'; '.join(sentences)}" if sentences else ""


def task_metrics(metrics: Mapping[str, float | None]) -> dict[str, dict[str, str]]:
    """Return the task metrics among all metrics, by task and metric, formatted: `0.312 ± 0.013`."""
    found: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        metric, _, task = key.partition(".")
        if metric + ERROR + "." + task in metrics:
            error = metrics[f"{metric}{ERROR}.{task}"]
            found.setdefault(task, {})[metric] = f"{value:.4g}" + (f" ± {error:.2g}" if error == error else "")
    return found
