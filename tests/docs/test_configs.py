"""Every file in config/ loads and passes what is checked before anything is compiled."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from gregale.axes.mesh import make_mesh
from gregale.data.tokenizers import BpeConfig, BytesConfig
from gregale.errors import UserError
from gregale.programs.runtime.setup import set_up
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.docs.pages import ROOT

FILES = sorted((ROOT / "config").glob("*.yaml"))
DEVICES = {"llama_8b_two_slices": 128}
"""Where it is not the product of the mesh's axes, with -1 as 1."""


@dataclass(frozen=True)
class Device:
    """What a mesh and the checks read of a device; the checks compute nothing."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"
    compute_capability: str = "9.0"


def check(path: Path, *overrides: str) -> None:
    config = load(TrainConfig, path, overrides)
    count = DEVICES.get(path.stem) or prod(abs(size) for size in vars(config.mesh).values())
    match config.data.tokenizer:
        case BytesConfig():
            tokens = 257
        case BpeConfig(vocabulary=vocabulary):
            tokens = vocabulary
        case _:
            tokens = config.model.vocabulary  # type: ignore[attr-defined]
    set_up(config, tokens, make_mesh(config.mesh, [Device(number) for number in range(count)]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_set_up_and_annotated(path):
    check(path)
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# ")
    assert any("#" in line and not line.startswith("#") for line in rest)


def test_one_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"batch\.size is 250"):
        check(ROOT / "config" / "llama_8b_two_slices.yaml", "--batch.size=250")
