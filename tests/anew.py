"""JAX without a folder for compiled programs, and what it tells of one."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

from gregale.training.compiler import FOLDER

SETTINGS = (FOLDER, "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_enable_xla_caches")


@contextmanager
def as_a_process_begins() -> Iterator[None]:
    """JAX has not been given a folder; afterwards it has that of before."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update(FOLDER, None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@contextmanager
def cache_events() -> Iterator[list[str]]:
    """What JAX tells of its folder for compiled programs: `cache_hits`, `cache_misses`, as they come."""
    seen: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            seen.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)
