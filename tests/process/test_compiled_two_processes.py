"""Two processes on hosts of their own: at the second start neither compiles."""

from gregale.services.compiled_store import ALL_WRITE_BEFORE

PROGRAM = """
import os
os.environ["XDG_CACHE_HOME"] = f"{sys.argv[3]}/{rank}"

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from gregale.services.compiled import keep_compiled

keep_compiled("auto")
events = []

def listen(event, **_):
    if "compilation_cache/cache_" in event:
        events.append(event.rpartition("/")[2])

jax.monitoring.register_event_listener(listen)
mesh = Mesh(np.asarray(jax.devices()), ("all",))
split, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
ones = jax.make_array_from_callback((4,), split, lambda index: np.ones(4, np.float32)[index])
print(float(jax.jit(lambda x: (2 * x).sum(), out_shardings=everywhere)(ones)), *events)
"""


def test_each_process_keeps_what_it_compiles(run_two_processes, tmp_path):
    """JAX alone writes in process 0 only."""
    import jax

    assert jax.__version_info__ < ALL_WRITE_BEFORE, "do all processes write by themselves? Then raise the bound"
    last = [output.splitlines()[-1] for output in run_two_processes(PROGRAM, str(tmp_path))]
    assert last == ["8.0 cache_misses"] * 2
    last = [output.splitlines()[-1] for output in run_two_processes(PROGRAM, str(tmp_path))]
    assert last == ["8.0 cache_hits"] * 2
