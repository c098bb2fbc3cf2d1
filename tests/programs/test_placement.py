"""The place of experts: closed forms choose it, alike for all commands, and `plan` says which and why."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gregale.axes.layout import MappingConfig, MeshConfig, make_mesh
from gregale.communication.pipeline import PipelineConfig
from gregale.errors import UserError
from gregale.programs.plan.devices import simulated_target
from gregale.programs.plan.report import experts_of
from gregale.programs.plan.search import SearchOptions, search
from gregale.programs.plan.text import experts_line
from gregale.programs.runtime.build import ExpertPlacement, Figures, choice_of, in_places, set_up
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


def test_qwen_is_gathered_with_many_tokens_and_exchanged_with_few():
    """The TPU compiler: 6.15 GiB and 15.2 sent gathered, 6.86 and 9.2 exchanged; with a quarter of the tokens 5.15 and
    4.61 GiB."""
    many, few = qwen(8192), qwen(2048)
    found = choice_of(*in_places(many.config, 151936, many.layout.mesh))
    gathered, exchanged = found.gathered, found.exchanged
    assert exchanged is not None
    assert gathered.peak < exchanged.peak
    assert gathered.sent > 1.5 * exchanged.sent
    assert gathered.seconds < exchanged.seconds, "gathers go behind products, and use all links of a chip"
    assert many.layout == qwen(8192, MappingConfig(compute={"experts": None})).layout
    assert few.layout == qwen(2048, EXCHANGED).layout
    assert few.config.mapping == AUTO, "another mesh may have another place"


def test_the_fastest_that_fits_is_chosen_and_else_the_smallest():
    gathered, exchanged = Figures(seconds=1, peak=10, sent=5), Figures(seconds=2, peak=8, sent=3)
    assert [ExpertPlacement("v5e", memory, gathered, exchanged).exchanges for memory in (12, 9, 7)] == [
        False,
        True,
        True,
    ]
    assert not ExpertPlacement("v5e", 12, gathered, gathered).exchanges


def line_of(setup: Setup) -> str:
    found = experts_of(setup, 257)
    assert found is not None
    return experts_line(found)


def test_plan_says_which_and_why():
    few = small_setup((1, 8, 1), 1, model={"experts": replace(EXPERTS, count=64)}, others={"mapping": AUTO})
    line = line_of(few)
    assert line.startswith("Experts: exchanged, the fastest that fits. By closed forms for H100, with one round")
    assert line.index(": exchanged ") < line.index("; gathered "), "with both figures"
    assert line.count("sent inside a replica") == 2


def test_experts_that_cannot_be_exchanged_are_gathered():
    setup = small_setup((1, 8, 1), 1, model={"experts": replace(EXPERTS, count=12)}, others={"mapping": AUTO})
    line = line_of(setup)
    assert "Experts: gathered, the fastest that fits." in line
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
        search(setup.config, 257, simulated_target(setup.config, 8, None), SearchOptions(None, None, print))
