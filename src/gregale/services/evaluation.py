"""The configuration of evaluations within a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from gregale.settings import Settings, whole


@dataclass(frozen=True)
class EvaluationConfig(Settings):
    """When and on how much the held-out loss is taken, and which tasks are scored with it."""

    every: int | None = field(
        default=None,
        metadata={
            "help": "steps between evaluations; null: at the end only",
            "range": whole(1),
            "aliases": ("eval_every", "eval_steps", "eval_interval", "evaluation_steps"),
        },
    )
    batches: int | None = field(
        default=None,
        metadata={
            "help": "held-out batches to evaluate on; null: all",
            "range": whole(1),
            "aliases": ("eval_batches", "eval_iters", "max_eval_batches"),
        },
    )
    bigram: bool = field(default=False, metadata={"help": "at the end, show a bigram model of the same text beside it"})
    tasks: list[str] = field(
        default_factory=list,
        metadata={"help": "files of tasks (globs, JSON lines) to score", "aliases": ("eval_tasks",)},
    )
    parse_special: bool = field(
        default=False, metadata={"help": "names of special tokens in tasks are the tokens, and no text"}
    )
