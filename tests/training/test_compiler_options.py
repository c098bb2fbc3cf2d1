from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from gregale.data.tokenizers import BytesTokenizer
from gregale.errors import UserError
from gregale.islands.method import as_island, methods_of_island
from gregale.methods.config import DilocoConfig
from gregale.programs.plan.devices import topology_target
from gregale.programs.runtime.sampler import training_sampler
from gregale.programs.train.resume import converted
from gregale.training.compiler import DEFAULTS, check_compiler_options, compiler_options
from tests.cost.steps import small_setup
from tests.mesh.support import Device

pytestmark = pytest.mark.usefixtures("compiled_anew")  # a program for devices that are not there is not kept


@pytest.mark.parametrize(
    ("topology", "count", "kind"),
    [("v5e:2x2", 7, "TPU v5 lite"), ("v6e:2x2", 10, "TPU v6 lite"), ("v5p:2x2x1", 10, "TPU v5")],
)
def test_each_family_has_its_own_and_its_compiler_takes_them(topology, count, kind):
    target = topology_target(topology, 1, None)
    assert {device.device_kind for device in target.devices} == {kind}
    mesh = Mesh(np.array(target.devices), "data")
    assert len(compiler_options({}, mesh) or {}) == count
    name, value = "xla_tpu_scoped_vmem_limit_kib", 50000
    given = {**dict.fromkeys(DEFAULTS[kind], False), name: value}
    assert compiler_options(given, mesh) == given, "what is given goes first"
    check_compiler_options(compiler_options({name: value}, mesh) or {}, mesh)
    assert (compiler_options({}, mesh, pipelines_sums=False) or {})["xla_tpu_enable_ici_ar_pipelining"] is False
    with pytest.raises(
        UserError, match=r"compiler for TPU .* does not take them: No such compile option: 'xla_nonsense'"
    ):
        check_compiler_options({"xla_nonsense": True}, mesh)


def test_options_of_other_platforms_are_left_out():
    mesh = Mesh(np.array(jax.devices()[:1]), "data")
    assert compiler_options({}, mesh) is None
    assert compiler_options({"xla_tpu_nonsense": True, "xla_gpu_nonsense": 1}, mesh) is None
    assert compiler_options({"xla_cpu_nonsense": True, "xla_nonsense": 1}, mesh) == {
        "xla_cpu_nonsense": True,
        "xla_nonsense": 1,
    }


NONSENSE = {"xla_nonsense": True}


def test_every_program_of_a_run_is_compiled_with_its_options(monkeypatch):
    """Each is made by `jax.jit` with them: the initial state, changes of method, steps, samples."""
    options = {"xla_cpu_enable_fast_min_max": False}
    setup = small_setup((1, 1, 1), compute={"compiler_options": options})
    taken: list[dict] = []
    jit = jax.jit

    def noted(function, **given):
        if getattr(getattr(function, "func", function), "__module__", "").startswith("gregale"):
            taken.append(given.get("compiler_options") or {})
        return jit(function, **given)

    monkeypatch.setattr(jax, "jit", noted)
    converted(setup, setup.initial_state(), 0, replace(setup.psdp, microbatches=1))
    setup.stepper()
    training_sampler(setup, BytesTokenizer())
    assert len(taken) == 9, "next to nothing, two states, the step and what follows it, and four for texts"
    assert all(each.items() >= options.items() for each in taken)


def test_programs_of_an_island_are_compiled_with_its_options():
    setup = small_setup((1, 1, 1), compute={"compiler_options": {"xla_cpu_enable_fast_min_max": False}})
    island = as_island(methods_of_island(DilocoConfig(period=5), setup.method_context).chosen)
    assert island.compiler_options == setup.compiler_options
    state, fragment = jax.eval_shape(island.init), island.fragment(0)
    theta = jax.eval_shape(lambda tree: tree, state.psdp.parameters)
    refused = replace(island, compiler_options=NONSENSE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        refused._depart.lower(state.psdp.parameters, state.error, theta, fragment).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        refused._arrive.lower(state.psdp.parameters, state.error, theta, fragment, np.float32(0), None).compile()


@pytest.mark.parametrize(("kind", "count"), [("NVIDIA H100 80GB HBM3", 2), ("NVIDIA A100-SXM4-40GB", 2), ("gfx942", 0)])
def test_nvidias_gpus_have_theirs_and_their_names_are_xlas(kind, count):
    gpus = Mesh(np.array([Device(device_kind=kind)]), "data")
    found = compiler_options({}, gpus) or {}
    assert len(found) == count
    check_compiler_options(found, Mesh(np.array(jax.devices()[:1]), "data"))  # XLA's compilers have one list of names


def test_steps_are_compiled_with_the_configurations_options():
    setup = small_setup((1, 1, 1), compute={"compiler_options": {"xla_nonsense": True}})
    with pytest.raises(UserError, match=r"compute\.compiler_options: the compiler for cpu does not take them"):
        setup.stepper()
    setup = small_setup((1, 1, 1), compute={"compiler_options": {"xla_cpu_enable_fast_min_max": False}})
    assert setup.compiler_options == setup.run_metadata["compiler_options"] == {"xla_cpu_enable_fast_min_max": False}
