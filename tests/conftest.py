"""Every test sees eight simulated CPU devices; the flags have to be set before JAX starts."""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from uuid import uuid4

import hypothesis
import pytest

from gregale.storage import ObjectPath
from tests.processor_time import OPTION, ProcessorTime
from tests.stores import BUCKET, CREDENTIALS, s3_server

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Compiling takes most of the suite's time; these four leave partitioning alone and take most of that.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # in 32 parts, as by default, it takes a quarter more
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner",  # as `gregale train` has it for as many devices
    # On a busy machine the threads of eight simulated devices can be minutes apart.
    "--xla_cpu_collective_call_terminate_timeout_seconds=120",
)

# Also where the environment says otherwise: without bytecode each process that a test starts compiles all of Gregale.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of the simulated devices: with twice as many as there are devices or fewer, those that wait in a collective of
# the next step can leave none for a device that is still in the last one.
os.environ.setdefault("PJRT_NPROC", "24")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Compiled programs are told apart by their scopes too, which audits read, but not by the lines of their source.
os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

hypothesis.settings.register_profile("suite", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("suite")

GROWTH_BYTES = 1_500_000_000  # of a worker's memory, before it frees what it can
TESTS = Path(__file__).parent
# What takes long, whole programs and steps on many meshes above all. `make quick` leaves it out, and it is begun first,
# so that no worker is left alone with one of these files at the end.
SLOW = (
    *("process/", "mesh/", "programs/", "docs/", "methods/"),
    *("communication/pipeline/test_stack.py", "model/test_llama.py", "inference/test_generate.py", "model/kernels/"),
    *("cost/test_traffic.py", "communication/test_quantised.py", "communication/test_network.py", "huggingface/"),
    *(
        "islands/transport/test_lighthouse.py",
        "islands/transport/test_transfer.py",
        "islands/simulator/test_simulator.py",
    ),
    *("distributed/test_rendezvous.py", "checkpoint/test_checkpoint.py"),
    *("distributed/test_liveness.py", "storage/test_faults.py", "data/test_build.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=float, help="fail if the tests take more, see tests/processor_time.py")


def pytest_configure(config: pytest.Config) -> None:
    """The user's cache directory is one of the tests', here and in every process that they start."""
    config.pluginmanager.register(ProcessorTime(TESTS, config.getoption(OPTION)))
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:  # a shell that inherits this cannot catch the signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("user_cache"))  # type: ignore[union-attr]
    config.addinivalue_line("markers", "slow: takes long; `make quick` leaves it out")
    config.addinivalue_line("markers", "quick: a small test of an algorithm in a slow file, which `make quick` has too")
    config.addinivalue_line("markers", "soak: takes minutes; only `make soak` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place_in_slow)
    for item in items:
        is_slow = place_in_slow(item) < len(SLOW) and not item.get_closest_marker("quick")
        if is_slow or item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item) -> None:
    """After a failure a hang is found too, in the end of a fixture: pytest itself gives up its watch then."""
    if not node.config.getoption("usepdb"):
        seconds = float(node.config.getini("faulthandler_timeout"))
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def place_in_slow(item: pytest.Item) -> int:
    path = name_of(item.path)
    return next((place for place, start in enumerate(SLOW) if path.startswith(start)), len(SLOW))


@cache
def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


@pytest.fixture(scope="session", autouse=True)
def compile_once() -> None:
    """Equal programs are compiled once, by whichever test, worker or earlier session came first.

    `pytest --cache-clear` forgets them.
    """
    from gregale.training.compiler import keep_compiled

    keep_compiled("auto")
    gc.collect()
    gc.freeze()  # what is imported stays; to look through it again and again takes a tenth of the time of tracing
    gc.set_threshold(50_000, 20, 100)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def memory_limit() -> list[int]:
    """Resident bytes above which the next module's end frees memory."""
    return [GROWTH_BYTES]


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(memory_limit) -> Iterator[None]:
    """Frees what a module leaves, once that is much: it takes a second and makes programs that others share anew."""
    yield
    if resident_bytes() > memory_limit[0]:
        import jax

        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory_limit[0] = resident_bytes() + GROWTH_BYTES


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """One stand-in for S3 and GCS for all tests of a session."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint, monkeypatch) -> ObjectPath:
    """A folder of an S3 stand-in that no other test has; this process and those that it starts reach it."""
    for name, value in {"AWS_ENDPOINT_URL": s3_endpoint, **CREDENTIALS}.items():
        monkeypatch.setenv(name, value)
    return ObjectPath(f"s3://{BUCKET}/{uuid4().hex[:8]}")


@pytest.fixture
def gs(s3_endpoint, monkeypatch) -> ObjectPath:
    """A folder of the GCS stand-in that no other test has; this process and those that it starts reach it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", s3_endpoint)
    return ObjectPath(f"gs://{BUCKET}/{uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def compiled_anew(tmp_path_factory) -> Iterator[None]:
    """For a module that looks at what the compiler says beside the program, which no folder keeps: one of its own."""
    from gregale.training.compiler import keep_compiled
    from tests.anew import as_a_process_begins

    with as_a_process_begins():
        keep_compiled(str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch) -> None:
    """Tables and help have the width for files, also where something (readline, in xdist's workers) says otherwise."""
    monkeypatch.delenv("COLUMNS", raising=False)
