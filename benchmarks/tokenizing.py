"""Tokenising beside the tokenizers library alone, on the same cores and the same text.

    .venv/bin/python benchmarks/tokenizing.py             # 64 MB of Python's files, three rounds; some minutes
    .venv/bin/python benchmarks/tokenizing.py --mb 16 --rounds 1

The library has its text in memory, already read, and encodes it with a thread for each core (`encode_batch`); its ids
are not even taken. `build_store` starts its processes, reads JSON lines, encodes, writes and checks the parts
and completes the store: all that `gregale tokenize` does. Both take turns, so that a busy machine is busy
for both. Prints medians, in MB/s by the clock and in seconds of the processors, and the ratio.
"""

import argparse
import glob
import json
import os
import resource
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gregale.data.build import NamedSource, TokenCache, build_store
from gregale.data.sources import JsonLinesSource
from gregale.data.store import ChunkCache, silent
from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import BpeConfig, FileConfig

VOCABULARY = 32_000
SAMPLE_BYTES = 4_000_000
BATCH_TEXTS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=64, help="megabytes of text")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"] = str(cores)
    texts = python_files(round(options.mb * 1e6))
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = folder / "tokenizer.json"
        saved.write_text(json.dumps(train_bpe(BpeConfig(VOCABULARY), sample(texts)).to_json()["library"]))
        with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        found: dict[str, list[tuple[float, float]]] = {"tokenizers alone": [], "gregale": []}
        for round_ in range(options.rounds):
            found["tokenizers alone"].append(timed(library_alone(saved, texts)))
            found["gregale"].append(timed(gregale(saved, folder, round_, cores)))
            for label, times in found.items():
                print(f"round {round_ + 1}: {label} {times[-1][0]:.1f} s, processors {times[-1][1]:.1f} s", flush=True)
    clock, processors = (
        {name: statistics.median(t[at] for t in times) for name, times in found.items()} for at in (0, 1)
    )
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, {cores} cores, medians of {options.rounds}:")
    for label in found:
        print(f"  {label}: {size / 1e6 / clock[label]:.2f} MB/s by the clock, {processors[label]:.1f} s of processors")
    for label, times in (("by the clock", clock), ("by the processors", processors)):
        print(f"  gregale at {100 * times['tokenizers alone'] / times['gregale']:.0f} percent of it {label}")


def python_files(size: int) -> list[str]:
    """Texts of the Python files of the interpreter and its packages, some of them twice if need be: `size` bytes."""
    paths = sorted({*glob.glob(f"{sysconfig.get_path('stdlib')}/**/*.py", recursive=True)})
    paths += sorted(glob.glob(f"{sysconfig.get_path('purelib')}/**/*.py", recursive=True))
    texts, found = [], 0
    while found < size:
        for path in paths:
            text = Path(path).read_text(encoding="utf-8", errors="ignore")
            texts.append(text)
            found += len(text.encode())
            if found >= size:
                break
    return texts


def sample(texts: list[str]):
    """Some of the texts, of `SAMPLE_BYTES`, from all over."""
    step = max(1, sum(map(len, texts)) // SAMPLE_BYTES)
    return iter(texts[::step])


def library_alone(saved: Path, texts: list[str]) -> Callable[[], None]:
    """Encodes texts in memory by the library and its threads."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(saved))
    library.encode_special_tokens = True

    def run() -> None:
        for start in range(0, len(texts), BATCH_TEXTS):
            library.encode_batch(texts[start : start + BATCH_TEXTS], add_special_tokens=False)

    return run


def gregale(saved: Path, folder: Path, round_: int, cores: int) -> Callable[[], None]:
    """Builds the token store of the same texts."""
    tokenizer = FileConfig(str(saved), "<|end_of_document|>").build()
    source = NamedSource("text", JsonLinesSource(files=(str(folder / "text.jsonl"),)))
    cache = TokenCache(folder / f"cache-{round_}", ChunkCache(folder / "pieces"))

    def run() -> None:
        build_store(source, tokenizer, cache, cores, silent).verify()

    return run


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of the processors: of this process and of those that it has started and waited for."""
    begin, used = time.perf_counter(), processor_seconds()
    run()
    return time.perf_counter() - begin, processor_seconds() - used


def processor_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


if __name__ == "__main__":
    main()
