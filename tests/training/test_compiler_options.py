from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from gregale.errors import UserError
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.shapes import abstract_batch
from gregale.training.compiler_options import DEFAULTS, compiler_options
from gregale.training.stepper import Stepper
from tests.audit.steps import small_setup

pytestmark = pytest.mark.usefixtures("compiled_anew")  # a program for devices that are not there is not kept


@pytest.mark.parametrize(
    ("topology", "count", "kind"),
    [("v5e:2x2", 0, "TPU v5 lite"), ("v6e:2x2", 5, "TPU v6 lite"), ("v5p:2x2x1", 1, "TPU v5")],
)
def test_each_family_has_its_own_and_its_compiler_takes_them(topology, count, kind):
    target = topology_target(topology, 1, None)
    assert {device.device_kind for device in target.devices} == {kind}
    mesh = Mesh(np.array(target.devices), "data")
    assert len(compiler_options({}, mesh) or {}) == count
    name, value = "xla_tpu_scoped_vmem_limit_kib", 50000
    options = compiler_options({name: value, **dict.fromkeys(DEFAULTS.get(kind, ()), False)}, mesh)
    assert options == {name: value, **dict.fromkeys(DEFAULTS.get(kind, ()), False)}, "what is given goes first"
    with pytest.raises(
        UserError, match=r"compiler for TPU .* does not take them: No such compile option: 'xla_nonsense'"
    ):
        compiler_options({"xla_nonsense": True}, mesh)


@dataclass(frozen=True)
class Gpu:
    """What is read of a device."""

    device_kind: str


@pytest.mark.parametrize(("kind", "count"), [("NVIDIA H100 80GB HBM3", 2), ("NVIDIA A100-SXM4-40GB", 2), ("gfx942", 0)])
def test_nvidias_gpus_have_theirs_and_their_names_are_xlas(kind, count):
    gpus = Mesh(np.array([Gpu(kind)]), "data")
    found = compiler_options({}, gpus) or {}
    assert len(found) == count
    here = Mesh(np.array(jax.devices()[:1]), "data")
    assert compiler_options(found, here) == (found or None), "XLA's compilers have one list of names"


def test_steps_are_compiled_with_the_configurations_options():
    assert compiler_options({}, Mesh(np.array(jax.devices()[:1]), "data")) is None
    setup = small_setup((1, 1, 1), compute={"compiler_options": {"xla_nonsense": True}})
    with pytest.raises(UserError, match=r"compute\.compiler_options: the compiler for cpu does not take them"):
        setup.stepper()
    setup = small_setup((1, 1, 1), compute={"compiler_options": {"xla_cpu_enable_fast_min_max": False}})
    assert setup.compiler_options == {"xla_cpu_enable_fast_min_max": False}
    refused = Stepper(setup.method, setup.model, {"xla_nonsense": True}).program
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        refused.lower(setup.abstract_state(), abstract_batch(setup)).compile()
