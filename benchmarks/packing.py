"""Filling of rows by `concat`, `fit` and `pad`, counted on documents of log-normal lengths, and the time of the index.

    .venv/bin/python benchmarks/packing.py                    # a million documents, some seconds
    .venv/bin/python benchmarks/packing.py --documents 1e7    # the time of an index of ten million

The logarithm of a length has the standard deviation 1. Longer documents are cut to a row, which all three see. Time is
processor time of one core.
"""

import argparse
import time

import numpy as np

from gregale.data.examples import DocumentStream, InMemory, Packing, rows_of
from gregale.data.tokenizers import NONE

CASES = ((400, 2048), (400, 8192), (1200, 2048), (1200, 4096))  # mean tokens of a document, tokens of a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, default=1e6)
    count = int(parser.parse_args().documents)
    print("| mean tokens | row | concat | documents that concat cuts | fit | pad | seconds of fit |")
    print("|---|---|---|---|---|---|---|")
    for mean, length in CASES:
        sizes = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1, count).clip(2, length + 1).astype(np.int64)
        offsets = np.concatenate([[0], sizes]).cumsum()
        stream = DocumentStream(InMemory(np.zeros(0), offsets, NONE), np.ones(count, bool))  # no row is read
        full, seconds = {}, 0.0
        for kind in ("concat", "fit", "pad"):
            began = time.process_time()
            rows = rows_of(stream, length, Packing(kind))
            full[kind] = rows.targets / (len(rows) * length)
            seconds = time.process_time() - began if kind == "fit" else seconds
        cut = np.mean((offsets[1:] - 2) // length > offsets[:-1] // length)  # its targets are in several windows
        shares = " | ".join(f"{share:.1%}" for share in (full["concat"], cut, full["fit"], full["pad"]))
        print(f"| {mean:,} | {length:,} | {shares} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
