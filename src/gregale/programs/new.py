"""Provides `gregale new`: a copy of an annotated example, or a configuration for the user's text, model and devices."""

import os
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gregale.data.sources.base import expand, files_matching
from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.settings import Settings, did_you_mean, setting, shown
from gregale.streams import say

FILES = (files("gregale") / "starters").iterdir()
STARTERS = {path.name.removesuffix(".yaml"): path for path in FILES if path.name.endswith(".yaml")}
DEFAULT = "quickstart"
LADDER = ((4, 128), (6, 256), (8, 512), (12, 768), (16, 1024), (24, 1536), (24, 2048), (32, 4096))  # layers, hidden
HEAD = 64  # values of a head, if the model has at least four
TOKENS_PER_PARAMETER = 20  # arXiv 2203.15556
STATE_BYTES = 16  # of a parameter: float32 weight, gradient, two moments
STATE_SHARE = 0.4  # of the devices' memory, for the state
VOCABULARIES = {2e6: 0, 50e6: 4096, 1e9: 16384, float("inf"): 32768}  # by bytes of text; 0: bytes
KINDS = {".jsonl": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}  # of sources, by the file's name
BYTES_PER_TOKEN = {0: 1.0, 4096: 3.0, 16384: 3.8, 32768: 4.2}


@dataclass(frozen=True)
class NewOptions(Settings):
    file: str = field(metadata={"help": "the YAML file to write"})
    starter: str = setting(
        "", f"an example to copy ({', '.join(sorted(STARTERS))}), or an import or run to go on with; also `--from`"
    )
    text: list[str] = setting(list, "files (globs) of text: a configuration that trains on them, on these devices")
    chat: list[str] = setting(list, "files (globs) of conversations, JSON lines with messages; likewise")

    def __post_init__(self):
        super().__post_init__()
        if self.text and self.chat:
            raise UserError("text and chat are both given; give one, and add the other under data.sources.")
        if not self.text and not self.chat and (self.starter or DEFAULT) not in STARTERS:
            near = did_you_mean(get_close_matches(self.starter, STARTERS, n=1))
            raise UserError(
                f"starter is {shown(self.starter)}, which is no example.{near} They are: "
                f"{', '.join(sorted(STARTERS))}. To go on with a model of yours, name its data too: --text FILES or "
                "--chat FILES."
            )


class Devices(NamedTuple):
    platform: str  # cpu, gpu, tpu
    count: int
    memory: int  # bytes of one; of processors, of the host


class Sizes(NamedTuple):
    layers: int
    hidden: int
    parameters: int


def main(options: NewOptions) -> int:
    path = expand(options.file, "file")
    if options.text or options.chat:
        content, told = configuration(options, Path(path).stem, devices_here())
    else:
        starter = options.starter or DEFAULT
        content = STARTERS[starter].read_text(encoding="utf-8")
        told = f"a copy of the example {starter}. Its first lines say what it trains and on which devices."
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"file: {path} cannot be made: {error.strerror}. Give another name.") from None
    say(f"{path}: {told}")
    return 0


def devices_here() -> Devices:
    import jax

    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Devices(devices[0].platform, len(devices), stats.get("bytes_limit", host))


def configuration(options: NewOptions, name: str, devices: Devices) -> tuple[str, str]:
    """Return a YAML file and what it trains, for the text or conversations of the options."""
    patterns, key = (options.text, "text") if options.text else (options.chat, "chat")
    found = {file: status.size for pattern in patterns for file, status in files_matching(pattern, key).items()}
    if not found:
        raise UserError(f"{key}: no file matches {', '.join(patterns)}. Patterns may use *, ? and **.")
    size, source = sum(found.values()), {"type": type_of(list(found), key), "files": patterns}
    vocabulary = next(each for limit, each in VOCABULARIES.items() if size <= limit)
    tokens = max(1, int(size / BYTES_PER_TOKEN[vocabulary]))
    longest = 0
    if options.chat:
        longest = int(max(map(longest_line, found)) / BYTES_PER_TOKEN[vocabulary])
        source["long_documents"] = "keep_start"
    length, rows, microbatches = batch_of(tokens, longest, devices)
    steps = min(max(200, ceil(4 * tokens / (rows * length))), 2_000 if devices.platform == "cpu" else 50_000)
    whole: dict[str, Any] = {"name": name, "steps": steps, "mesh": {"data": -1}}
    if options.starter:
        whole |= {"start_from": options.starter, "adapter": {"rank": 16}}
        tokenizer, rate, told = tokenizer_of(options.starter), 2e-4, f"adapters beside the model of {options.starter}"
    else:
        sizes = sizes_for(tokens, vocabulary, devices)
        heads = max(4, sizes.hidden // HEAD)
        whole["model"] = {"type": "llama", "layers": sizes.layers, "hidden": sizes.hidden, "heads": heads}
        whole["model"]["mlp"] = 8 * sizes.hidden // 3 // 64 * 64
        tokenizer = {"type": "bpe", "vocabulary": vocabulary} if vocabulary else {"type": "bytes"}
        rate, told = 0.5 / sizes.hidden, f"a model of about {sizes.parameters / 1e6:,.1f} million parameters"
    whole |= {
        "compute": {"dtype": "float32", "remat": "none"} if devices.platform == "cpu" else {"dtype": "bfloat16"},
        "data": {"sources": {"mine": source}, "tokenizer": tokenizer, "held_out": 0.05},
        "batch": {"size": rows, "sequence_length": length, "microbatches": microbatches},
        "optimizer": {
            "type": "adamw",
            "learning_rate": float(f"{rate:.1g}"),
            "schedule": {"type": "cosine", "warmup": 0.1},
        },
        "checkpoint": {"every": max(50, steps // 5)},
        "evaluation": {"every": max(50, steps // 5)},
    }
    passes = f"{steps * rows * length / tokens:.1f}"
    about = f"{told}, {size / 1e6:,.2g} MB in {len(found)} file(s), {steps:,} steps: the text about {passes} times"
    where = f"{devices.count} {devices.platform} device(s)"
    head = f"# {about[0].upper()}{about[1:]}.\n# Sizes are for {where}; docs/configuration.md has all keys.\n"
    return head + yaml.safe_dump(whole, sort_keys=False), f"{about}, for {where}. Train: gregale train {options.file}"


def type_of(found: list[str], key: str) -> str:
    """Return the type of the source that reads files; raise `UserError` if one type does not read all of them."""
    kinds = {KINDS.get(Path(path.removesuffix(".gz")).suffix, "text") for path in found}
    if len(kinds) > 1:
        raise UserError(f"{key}: the files are of several kinds ({', '.join(sorted(kinds))}); name those of one.")
    (kind,) = kinds
    if key == "chat":
        if kind != "jsonl":
            raise UserError(f"chat: {found[0]} is no file of JSON lines (.jsonl). For plain text give --text.")
        return key
    if kind == "jsonl" and found[0].endswith(".jsonl"):
        with open(found[0], "rb") as file:
            first = file.readline()
        if b'"messages"' in first or b'"conversations"' in first:
            raise UserError(f"text: {found[0]} has conversations; give --chat in place of --text.")
    return kind


def longest_line(path: str) -> int:
    """Return the bytes of a file's longest line."""
    with open(path, "rb") as file:
        return max(map(len, file), default=0)


def batch_of(tokens: int, longest: int, devices: Devices) -> tuple[int, int, int]:
    """Return the length of a sequence, the sequences of a step, and the microbatches.

    A sequence holds a conversation of `longest` tokens, up to 4,096. Text has at least 200 sequences.
    """
    length, each = (256, 16) if devices.platform == "cpu" else (1024, 32)
    while length > 64 and tokens < 200 * length and not longest:
        length //= 2
    while length < min(longest, 4096):
        length *= 2
    return length, each * devices.count, max(1, each * length // 16_384)


def sizes_for(tokens: int, vocabulary: int, devices: Devices) -> Sizes:
    """Return the largest of `LADDER` that the text can teach and the devices hold; on a processor the first."""
    chosen = None
    for layers, hidden in LADDER:
        parameters = 12 * layers * hidden**2 + 2 * max(vocabulary, 257) * hidden
        fits = STATE_BYTES * parameters <= STATE_SHARE * devices.memory * devices.count
        taught = TOKENS_PER_PARAMETER * parameters <= 4 * tokens  # four passes
        if chosen is None or (fits and taught and devices.platform != "cpu"):
            chosen = Sizes(layers, hidden, parameters)
    assert chosen is not None
    return chosen


def tokenizer_of(origin: str) -> dict[str, Any]:
    """Return the tokenizer of an imported model or a run, for `data.tokenizer`."""
    from gregale.programs.runtime.trained_model import find_origin

    return yaml.safe_load((Path(str(find_origin(origin).path)) / "config.yaml").read_text(encoding="utf-8"))["data"][
        "tokenizer"
    ]


COMMAND = Command(main=main, options=NewOptions, positional=("file",), aliases={"from": "starter"})
