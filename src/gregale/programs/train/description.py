"""Provides the lines that describe a run at its begin and at its end."""

from gregale.axes.parameters import parameter_count
from gregale.data.preparation import Corpus
from gregale.evaluation.bigram import bigram_bits_per_byte
from gregale.programs.runtime.evaluation import format_losses
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.tasks import format_tasks
from gregale.runs.config import TrainConfig


def describe(setup: Setup, corpus: Corpus) -> str:
    """Return the description of the run's model, devices, data and compiler options."""
    config = setup.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in setup.layout.mesh.shape.items() if size > 1)
    device = setup.layout.mesh.devices.flat[0]
    options = ", ".join(f"{name} {value}" for name, value in (setup.compiler_options or {}).items())
    epochs = config.steps * config.batch.size / sum(map(len, corpus.train_rows.values()))
    held_out = f"{corpus.held_out_tokens:,} tokens held out" if corpus.held_out_tokens else "nothing held out"
    validation = [f"{len(each):,} tokens of {name} to evaluate on" for name, each in corpus.validation_streams.items()]
    return (
        f"{config.name}: {parameter_count(setup.model):,} parameters on {setup.layout.mesh.size} {device.device_kind} "
        f"device(s){f' ({mesh})' if mesh else ''}; {config.steps:,} steps of {config.batch.tokens:,} tokens, "
        f"{epochs:.2f} epochs of {corpus.training_tokens:,} tokens; {', '.join([held_out, *validation])}"
        f"{f'; compiler options: {options}' if options else ''}"
    )


def summary(evaluation: dict[str, float], corpus: Corpus, config: TrainConfig) -> str:
    """Return the last evaluation, with the loss of a bigram model if `evaluation.bigram` is set."""
    if not config.evaluates:
        return "Done. Nothing was evaluated: data.held_out is 0 and there is no data.validation."
    of_text = format_losses(evaluation, held_out=corpus.held_out is not None, bits_digits=3)
    words = "; ".join(filter(None, (of_text, format_tasks(evaluation))))
    text = f"Done. {words[0].upper()}{words[1:]}"
    if not config.evaluation.bigram:
        return text + "."
    scored = corpus.held_out_streams if corpus.held_out is not None else corpus.validation_streams
    streams = corpus.train_streams.values(), scored.values()
    bigram = bigram_bits_per_byte(*streams, corpus.tokenizer.token_bytes, config.data.cross_documents)
    return f"{text}; a bigram model counted on the same training text: {bigram:.3f} bits per byte."
