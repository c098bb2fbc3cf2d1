"""Provides `gregale export`, which writes a run's model as a folder that transformers and compatible tools load."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np
import yaml

from gregale.axes.layout import Layout, MeshConfig
from gregale.axes.parameters import parameter_count
from gregale.checkpoint.multihost import by_first_process, messages_of_all
from gregale.data.chat.renderer import ChatEncoder
from gregale.data.sources.base import expand
from gregale.data.store import progress_bars, silent
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import release_memory, start_devices
from gregale.distributed.liveness import monitor_peers
from gregale.distributed.signals import stop_on_signals
from gregale.errors import UserError
from gregale.huggingface.config import exported_family, written_config
from gregale.huggingface.families import Family, Slot, slots_of
from gregale.huggingface.folder import (
    BESIDE,
    CONFIG,
    GENERATION,
    INDEX,
    copy_beside,
    made_whole,
    read_json,
    tensors_of,
    write_json,
)
from gregale.huggingface.peft import ADAPTER_WEIGHTS, adapter_slots
from gregale.huggingface.tokenizer import write_template, write_tokenizer
from gregale.huggingface.weights import (
    Dtypes,
    Files,
    Writer,
    bytes_of,
    files_of,
    plan_files,
    slots_by_name,
    write_index,
)
from gregale.programs.command import Command
from gregale.programs.runtime.setup import Setup
from gregale.programs.runtime.trained_model import (
    AVERAGE,
    LazyModel,
    base_name,
    decoder_of,
    find_run,
    on_devices,
    opened,
    reading_average,
    set_up_run,
    write_adapter_settings,
)
from gregale.runs.config import TrainConfig
from gregale.runs.history import Figures, FiguresReader
from gregale.runs.process_agreement import process_terms
from gregale.runs.run_directory import RunDirectory
from gregale.settings import Settings, above, setting, shown, whole
from gregale.streams import say
from gregale.version import __version__

T = TypeVar("T")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
GIGABYTE = 10**9
SHARD_GIGABYTES = 5.0
EVALUATED = {
    "eval_loss": ("held-out loss", "{:.4f} nats a token"),
    "bits_per_byte": ("held-out bits per byte", "{:.4f}"),
}


@dataclass(frozen=True)
class ExportOptions(Settings):
    run: str = field(metadata={"help": "the run: its directory, or its name under runs/"})
    target: str = field(metadata={"help": "the folder to make"})
    step: int | None = setting(None, "the checkpoint's step; null: the newest checkpoint", range=whole(0))
    average: bool = setting(False, AVERAGE)
    adapter: bool = setting(False, "write the run's adapters alone, as PEFT does; else they are merged")
    base: str | None = setting(None, "the model of these adapters, a folder or ORG/NAME; null: the imported one")
    dtype: str | None = setting(
        None,
        "the dtype of all tensors: float32, bfloat16 or float16; null: the imported model's, else float32",
        aliases=("torch_dtype",),
    )
    shard_gigabytes: float | None = setting(
        None,
        "the maximum size of a file; null: the files of the imported model, else 5",
        range=above(0),
        aliases=("max_shard_size",),
    )
    devices: int | None = setting(
        None, "number of devices that share each parameter; null: one, or one for each process", range=whole(1)
    )
    distributed: DistributedConfig = setting(
        DistributedConfig(), "the rendezvous of several processes that write together"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"dtype is {shown(self.dtype)}; valid choices: {', '.join(DTYPES)}.")


@dataclass(frozen=True)
class ImportedFiles:
    """Files beside an imported model's weights; empty for a model that was not imported.

    - `config`, `index`: contents of config.json and of the index of tensor files
    - `dtypes`: dtypes of its tensors by name; empty for a run that trained the model further
    """

    config: Mapping[str, Any]
    index: Mapping[str, Any]
    dtypes: Dtypes

    @staticmethod
    def of(run: RunDirectory) -> "ImportedFiles":
        paths = [run.huggingface / name for name in (CONFIG, INDEX)]
        config, index = (read_json(path) if path.is_file() else {} for path in paths)
        tensors = tensors_of(Path(str(run.huggingface))) if run.is_imported else {}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return ImportedFiles(config, index, dtypes)

    @property
    def dtype(self) -> str:
        found = self.config.get("dtype") or self.config.get("torch_dtype")
        return found if found in DTYPES else "float32"


@dataclass(frozen=True)
class Exported:
    run: RunDirectory
    setup: Setup
    step: int
    family: Family
    dtype: str


def main(options: ExportOptions) -> int:
    """Write the complete folder or none; each of several processes writes the shards of its devices."""
    run, target = find_run(options.run), Path(expand(options.target, "target"))
    config = spread(run.config_at(options.step), options)
    config = reading_average(config) if options.average else config
    if options.base and not options.adapter:
        raise UserError("base: it is the model of the adapters that --adapter writes; add --adapter, or leave it out.")
    if options.adapter and config.adapter is None:
        raise UserError(f"adapter: {run.path} has no adapters. Without --adapter its whole model is written.")
    watch = start_devices(config.cpu_devices, options.distributed, process_terms(options))
    with monitor_peers(watch, lambda: "The same command starts again."), stop_on_signals(), ExitStack() as stack:
        model = decoder_of(config.model)
        setup = set_up_run(run, config)
        tokenizer, imported = load_tokenizer(run.path), ImportedFiles.of(run)
        family = exported_family(setup.base, model, setup.Vocab, imported.config)
        rows = model.vocabulary or tokenizer.vocabulary_size
        slots = [slot.cut_to(rows) for slot in slots_of(setup.base, family)]
        if options.adapter:
            slots = adapter_slots(slots, setup.model)
        asked = options.dtype or ("float32" if options.adapter else None)
        dtypes = dtypes_of(slots, asked, imported)
        sizes = bytes_of(slots, dtypes)
        files = {ADAPTER_WEIGHTS: list(sizes)} if options.adapter else None
        files = files or files_for(sizes, options.shard_gigabytes, imported)
        found = stack.enter_context(opened(run, setup, options.step))
        base = base_name(found.base, options.base) if options.adapter and found.base else ""
        folder = stack.enter_context(made_by_all(target, sum(sizes.values())))
        write_tensors(folder, files, slots, found, setup.layout, dtypes)
        exported = Exported(
            run, setup, found.step, family, " and ".join(sorted({str(each) for each in dtypes.values()}))
        )
        if options.adapter:
            by_first(lambda: write_adapter_settings(folder, setup, slots, base), None)
        else:
            by_first(lambda: write_beside(folder, exported, rows, options.dtype or imported.dtype), None)
        if len(files) > 1:
            by_first(lambda: write_index(folder, files, sizes, imported.index.get("metadata", {})), None)
    if jax.process_index() == 0:
        made = f"a {family.model_type} in {exported.dtype}, {len(files)} file(s)"
        say(f"{target}: step {found.step} of {run.path}, {made}.")
        if note := rounded(dtypes, imported.dtypes):
            say(f"{target}: {note}")
    return 0


def dtypes_of(slots: list[Slot], asked: str | None, imported: ImportedFiles) -> Dtypes:
    """Return each tensor's dtype in the file: the requested one, the imported tensor's, or the configuration's."""
    otherwise = np.dtype(DTYPES[asked or imported.dtype])
    own = {} if asked else {name: dtype for name, dtype in imported.dtypes.items() if dtype.name in DTYPES}
    wide = np.dtype(np.float32)
    return {name: own.get(name, wide if slot.is_buffer else otherwise) for name, slot in slots_by_name(slots).items()}


def rounded(dtypes: Dtypes, before: Dtypes) -> str:
    """Return a note about the tensors that lost precision; empty if none did.

    - `before`: dtypes of the imported tensors; the tensors of a run are float32
    """
    kinds = Counter(
        (before.get(name, np.dtype(np.float32)).name, dtype.name)
        for name, dtype in dtypes.items()
        if np.result_type(before.get(name, np.float32), dtype) != dtype
    )
    if not kinds:
        return ""
    text = ", ".join(f"{count:,} of {len(dtypes):,} tensors from {old} to {new}" for (old, new), count in kinds.items())
    is_widest = all(new == "float32" for _, new in kinds)
    advice = "export writes no wider dtype" if is_widest else "`--dtype float32` keeps all digits of float32"
    return f"rounded: {text}; {advice}."


def spread(config: TrainConfig, options: ExportOptions) -> TrainConfig:
    """Return the configuration with the model on the requested devices: one, or all devices of several processes."""
    processes, devices = options.distributed.processes, options.devices
    if processes == 1 and options.distributed.coordinator is None:
        return on_devices(config, devices or 1)
    if config.cpu_devices:
        return on_devices(config, devices or processes)
    return on_devices(config, MeshConfig(data=devices or -1))


@contextmanager
def made_by_all(target: Path, size: int) -> Iterator[Path]:
    """Do `made_whole` for several processes that share a disk: process 0 makes and renames the folder."""
    with ExitStack() as stack:
        entered = by_first(lambda: str(stack.enter_context(made_whole(target, size))), "")
        yield Path(messages_of_all(entered)[0])
        messages_of_all("")  # a barrier: all processes have written


def by_first(action: Callable[[], T], otherwise: T) -> T:
    """Run `action` in process 0 only and return its result; return `otherwise` in other processes."""
    return action() if jax.process_count() == 1 else by_first_process(action, otherwise)


def write_tensors(
    folder: Path, files: Files, slots: list[Slot], found: LazyModel, layout: Layout, dtypes: Dtypes
) -> None:
    """Make the files in their full size, then write each parameter to its byte ranges."""
    plans = plan_files(folder, files, slots, dtypes)
    by_first(lambda: [plan.make() for plan in plans], None)
    done, total = 0, sum(bytes_of(slots, dtypes).values())
    with progress_bars() if jax.process_index() == 0 else nullcontext(silent) as report:

        def written(size: int) -> None:
            nonlocal done
            report("writing", done := done + size, total)

        writer = Writer(plans, layout, written)
        for slot in slots:
            writer.write(slot, found.read(slot.path))
            release_memory()
        writer.finish()


def files_for(sizes: Mapping[str, int], gigabytes: float | None, imported: ImportedFiles) -> dict[str, list[str]]:
    if gigabytes is None and imported.config:
        weight_map = imported.index.get("weight_map")
        if weight_map is None:
            return files_of(sizes, sum(sizes.values()))
        if set(weight_map) == set(sizes):
            names = sorted(set(weight_map.values()))
            return {file: [name for name in weight_map if weight_map[name] == file] for file in names}
    return files_of(sizes, int((gigabytes or SHARD_GIGABYTES) * GIGABYTE))


def write_beside(folder: Path, exported: Exported, rows: int, dtype: str) -> None:
    """Write the files beside the tensors: the imported ones, or new ones for a model that was not imported.

    - `dtype`: the dtype in config.json
    """
    run, config = exported.run, exported.setup.config
    tokenizer, imported = load_tokenizer(run.path), ImportedFiles.of(run)
    copy_beside(run.huggingface, folder, [name for name in BESIDE if name not in (CONFIG, INDEX)])
    context, end = config.batch.sequence_length, tokenizer.end_of_document
    # None, because transformers would otherwise use the token ids of its own models of this family.
    none = {"bos_token_id": None, "pad_token_id": None}
    saved = {"max_position_embeddings": 0, "eos_token_id": end, **(imported.config or none)}
    own = {
        "max_position_embeddings": max(context, saved["max_position_embeddings"]),
        "dtype" if "dtype" in saved else "torch_dtype": dtype,
    }
    write_json(folder / CONFIG, written_config(decoder_of(config.model), exported.family, rows, saved) | own)
    if not imported.config:
        write_json(folder / GENERATION, {"eos_token_id": end, "_from_model_config": True})
        write_tokenizer(tokenizer, folder, context)
    if tokenizer.chat_template is not None:
        write_chat(tokenizer, folder)
    metrics = FiguresReader(run.metrics).read()
    for problem in metrics.problems:
        say(problem)
    (folder / "README.md").write_text(model_card(exported, metrics), encoding="utf-8")


def write_chat(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the chat template, if the folder has not got it, and let generation end at the end of a turn."""
    write_template(tokenizer, folder)
    with ChatEncoder(tokenizer) as chat:
        end = chat.end_of_turn()
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    found = generation.get("eos_token_id", tokenizer.end_of_document)
    ends = found if isinstance(found, list) else [found]
    if end not in ends:
        write_json(folder / GENERATION, {**generation, "eos_token_id": [end, *ends]})


def model_card(exported: Exported, metrics: Figures) -> str:
    """Return README.md: the hub's header, and a table of facts; `metrics`: of the run."""
    config, step = exported.run.config_at(exported.step), exported.step
    facts = {
        "architecture": f"{exported.family.architecture}, {parameter_count(exported.setup.base):,} parameters in "
        f"{exported.dtype}",
        "trained by": f"Gregale {__version__}",
    }
    if config.start_from:
        facts["started from"] = config.start_from
    if step:
        facts["steps"] = f"{step:,} of {config.batch.tokens:,} tokens, {step * config.batch.tokens:,} tokens in all"
        facts["data"] = ", ".join(config.data.sources)
        facts["method"] = config.sync.get_choice_name(type(config.sync))
        facts["optimizer"] = config.optimizer.get_choice_name(type(config.optimizer))
        facts |= last_evaluation(metrics, step)
    header = yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gregale"]})
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"---\n{header}---\n\n# {config.name}\n\n| | |\n|---|---|\n{rows}\n"


def last_evaluation(metrics: Figures, step: int) -> dict[str, str]:
    """Return the held-out metrics that the run logged at a step, formatted."""
    found = {key: metrics[key].at(step) for key in EVALUATED if key in metrics}
    return {EVALUATED[key][0]: EVALUATED[key][1].format(value) for key, value in found.items() if value is not None}


COMMAND = Command(main=main, options=ExportOptions, plugins=True, positional=("run", "target"))
