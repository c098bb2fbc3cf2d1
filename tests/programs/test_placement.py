"""The place of experts: their bytes choose it, alike for all commands, and `plan` says which and why."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gregale.axes.layout import MappingConfig, MeshConfig, make_mesh
from gregale.communication.pipeline import PipelineConfig
from gregale.errors import UserError
from gregale.programs.plan.devices import simulated_target
from gregale.programs.plan.report import experts_of
from gregale.programs.plan.search import Compiler, search
from gregale.programs.plan.text import experts_line
from gregale.programs.runtime.build import ExpertPlacement, choice_of, in_places, set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.cost.steps import small_setup
from tests.cost.test_traffic import EXCHANGED, EXPERTS
from tests.mesh.support import Device

QWEN = Path(__file__).parents[2] / "config" / "qwen3_30b_a3b.yaml"
AUTO = MappingConfig(compute={"experts": "auto"})


@dataclass(frozen=True)
class Chip(Device):
    coords: tuple[int, ...] = ()


def v5e(*sizes: int) -> list[Chip]:
    """The chips of a slice, which are not there."""
    places = [(x, y, 0) for y in range(sizes[1]) for x in range(sizes[0])]
    return [Chip(number, 0, 0, "tpu", "TPU v5 lite", coords=place) for number, place in enumerate(places)]


def qwen(length: int, mapping: MappingConfig = AUTO) -> Setup:
    """Four layers of Qwen3 30B-A3B on v5e:4x4, a sequence on each chip."""
    config = load(TrainConfig, QWEN)
    model, batch = replace(config.model, layers=4), replace(config.batch, size=16, sequence_length=length)
    config = replace(config, model=model, batch=batch, mesh=MeshConfig(data=16), mapping=mapping)
    return set_up(config, 151936, make_mesh(config.mesh, v5e(4, 4)))


def test_few_rows_are_exchanged_and_of_many_the_matrices_are_gathered():
    """Of a sequence of 8,192 tokens a device has 65,536 rows of 4 KiB."""
    many, few = qwen(8192), qwen(1024)
    found = choice_of(*in_places(many.config, 151936, many.layout.mesh))
    matrices = 4 * 128 * 3 * 2048 * 768
    assert found.gathered == 3 * 2 * matrices * 15 // 16
    assert found.exchanged == pytest.approx(5 * 2 * 4 * 1.5 * 8 * 8192 * 2048 * 15 / 16, rel=1e-3)
    assert found.exchanged < found.gathered < 4 * found.exchanged, "not worth the waiting"
    assert many.layout == qwen(8192, MappingConfig(compute={"experts": None})).layout
    assert few.layout == qwen(1024, EXCHANGED).layout
    assert few.config.mapping == AUTO, "another mesh may have another place"
    assert [ExpertPlacement(9, exchanged).exchanges for exchanged in (2, 3)] == [True, False]


def line_of(setup: Setup) -> str:
    found = experts_of(setup, 257)
    assert found is not None
    return experts_line(found)


def test_plan_says_which_and_why():
    few = small_setup((1, 8, 1), 1, model={"experts": replace(EXPERTS, count=64)}, others={"mapping": AUTO})
    line = line_of(few)
    assert line.startswith("Experts: exchanged, by the rule of bytes. A device sends in a step, with one round")
    assert line.index(": exchanged ") < line.index("; gathered "), "with both figures"


def test_experts_that_cannot_be_exchanged_are_gathered():
    setup = small_setup((1, 8, 1), 1, model={"experts": replace(EXPERTS, count=12)}, others={"mapping": AUTO})
    line = line_of(setup)
    assert "Experts: gathered, by the rule of bytes." in line
    assert "; exchanged: model.experts.count is 12: " in line
    pipelined = {"mapping": AUTO, "pipeline": PipelineConfig(microbatches=2)}
    piped = small_setup((1, 2, 1, 2), 1, model={"experts": EXPERTS, "layers": 4}, others=pipelined)
    assert "; exchanged: mapping.compute.experts is data and pipeline is set" in line_of(piped)
    assert "as configured" in line_of(small_setup((1, 8, 1), model={"experts": EXPERTS}))
    assert experts_of(small_setup((1, 8, 1)), 257) is None


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(UserError, match=r"mapping.compute.experts: no array has the axis experts"):
        small_setup((1, 8, 1), others={"mapping": AUTO})
    setup = small_setup((1, 8, 1), model={"experts": EXPERTS}, others={"mapping": AUTO})
    with pytest.raises(UserError, match=r"may differ between candidates. Search with null"):
        search(setup.config, Compiler(257, simulated_target(setup.config, 8, None), None, None, print))
