"""Provides `gregale tokenize`, which builds the token store of a configuration before a run."""

from dataclasses import dataclass

import jax

from gregale.programs.command import Command
from gregale.programs.runtime.default_sizes import BATCH, SMALL, with_sizes
from gregale.programs.train.stages import corpora_of
from gregale.runs.config import TrainConfig
from gregale.streams import say
from gregale.tracking.trackers import Console


@dataclass(frozen=True)
class TokenizeOptions:
    """The command has no options of its own."""


def main(options: TokenizeOptions, config: TrainConfig) -> int:
    """Build the stores of all stages; the figures are those of the last one, which has the sources of all."""
    del options
    if config.cpu_devices is not None or jax.config.jax_platforms == "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        config = with_sizes(config, {BATCH: SMALL[BATCH]})  # those of `train` there
    with Console() as console:
        *before, corpus = corpora_of(config, console.progress)
        stores = {key: store for each in (*before, corpus) for key, store in each.stores.items()}
        for key, store in stores.items():
            store.verify(f"checking {key}", console.progress)
        for note in corpus.notes:
            console.message(note)
        for name, rows in corpus.train_rows.items():
            full = rows.targets / (len(rows) * rows.rows_together * rows.sequence_length)
            say(
                f"{name}: {len(rows.stream):,} tokens to train on, {len(corpus.held_out_streams[name]):,} held out; "
                f"{len(rows):,} rows of {rows.sequence_length:,}, {full:.1%} of their tokens have a target"
            )
        for name, stream in corpus.validation_streams.items():
            say(f"{name}: {len(stream):,} tokens to evaluate on")
        say(f"{corpus.training_tokens:,} training tokens, vocabulary {corpus.tokenizer.vocabulary_size:,}")
    return 0


READS = ("plugins", "stages", "data", "batch.sequence_length", "cpu_devices", "seed")
COMMAND = Command(main=main, options=TokenizeOptions, config=TrainConfig, reads=READS, positional=("config",))
