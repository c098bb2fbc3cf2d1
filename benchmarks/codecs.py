"""Encode and decode float32 values beside a plain copy of them: time, and memory of the fused program.

    python benchmarks/codecs.py [--mebi 64] [--codecs int8 int4 ...] [--rounds 9] [--json FILE]

Runs on JAX's default device (a GPU if it has one). A round runs every program once, so that what else the machine does
meets all of them alike. Wall and process times are the least over rounds; process time counts all cores and is the
steadier of the two where others share them. A copy is `x + 1`: one read, one write of all values. `extra copies` is the
peak of temporary memory that the compiler reports for encode and decode in one program, in units of the input.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gregale.codecs.codec import Codec
from gregale.codecs.config import ReduceConfig
from gregale.codecs.formats import BLOCK_BITS, CODECS
from gregale.codecs.message import decode_all, encode_all

Programs = dict[str, tuple[Callable, jax.Array]]


def both(codec: Codec, values: jax.Array) -> jax.Array:
    return decode_all(encode_all([values], codec), [values.size], codec)[0]


def compile_all(values: jax.Array, names: list[str], hadamard: bool) -> tuple[Programs, dict[str, float]]:
    """The programs with their inputs, by name, and the temporary memory of encode and decode in inputs."""
    programs = {"copy": (compiled(lambda x: x + 1, values), values)}
    extra = {}
    for name in names:
        codec = ReduceConfig(codec=name, hadamard=hadamard and name in BLOCK_BITS).first_codec()
        encode = compiled(codec.encode, values)
        message = encode(values)
        whole = compiled(lambda x, codec=codec: both(codec, x), values)
        programs[f"{name} encode"] = (encode, values)
        programs[f"{name} decode"] = (compiled(lambda m, codec=codec: codec.decode(m, values.size), message), message)
        programs[f"{name} both"] = (whole, values)
        extra[name] = whole.memory_analysis().temp_size_in_bytes / values.nbytes
    return programs, extra


def compiled(function: Callable, argument: jax.Array):
    return jax.jit(function).lower(argument).compile()


def least_times(programs: Programs, rounds: int) -> dict[str, tuple[float, float]]:
    """Least (wall, process) seconds of each program over the rounds, after one to warm up."""
    least = dict.fromkeys(programs, (float("inf"), float("inf")))
    for round_number in range(rounds + 1):
        for name, (program, argument) in programs.items():
            wall, process = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(argument))
            wall, process = time.perf_counter() - wall, time.process_time() - process
            if round_number:
                least[name] = (min(least[name][0], wall), min(least[name][1], process))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebi", type=int, default=64, help="values, in units of 2^20")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=["int8", "int4", "e3m0", "int2"])
    parser.add_argument("--hadamard", action="store_true", help="rotate blocks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()

    values = jax.random.normal(jax.random.key(0), (options.mebi * 2**20,), jnp.float32)
    programs, extra = compile_all(values, options.codecs, options.hadamard)
    least = least_times(programs, options.rounds)
    copy_wall, copy_process = least["copy"]

    print(f"{options.mebi} Mi float32 values on {jax.devices()[0].device_kind}")
    print("| program | wall ms | copies | process ms | copies |\n|---|---|---|---|---|")
    for name, (wall, process) in least.items():
        relative = f"{wall / copy_wall:.2f} | {process * 1e3:.1f} | {process / copy_process:.2f}"
        print(f"| {name} | {wall * 1e3:.1f} | {relative} |")
    print("extra copies, encode and decode in one program: " + ", ".join(f"{k} {v:.2f}" for k, v in extra.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": jax.devices()[0].device_kind, "seconds": least, "extra_copies": extra}, file, indent=1)
    over = {name: copies for name, copies in extra.items() if copies > 1}
    if over:
        raise SystemExit(f"more than one extra copy: {over}")


if __name__ == "__main__":
    main()
