"""What is imported when: nothing heavy before it is needed. Modules are counted, never seconds."""

import subprocess
import sys

import gregale
from tests.runs.runs import write_run

HEAVY = {"jax", "numpy", "haliax", "equinox", "optax", "draccus", "orbax", "grain", "tokenizers", "tensorstore", "rich"}
EXTRAS = {"wandb", "trackio", "tensorboardX", "pyarrow", "datasets"}


def imported_by(*programs: str) -> list[set[str]]:
    """The top-level modules that a fresh interpreter has after each of some programs."""
    told = "import sys; print('modules', *{name.partition('.')[0] for name in sys.modules})"
    program = "\n".join(f"{each}\n{told}" for each in programs)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("modules ")]


def test_nothing_heavy_before_it_is_used(tmp_path):
    write_run(tmp_path / "run", 1, saved=1)
    commands = ["--help"], ["--version"], ["trian"]
    names = "import gregale; gregale.UserError; gregale.setting"
    begun, listed = imported_by(
        f"{names}\nfrom gregale.cli import main; print(*map(main, {commands}))", f"main(['runs', {str(tmp_path)!r}])"
    )
    assert "gregale" in begun
    assert not begun & (HEAVY | EXTRAS)
    assert "jax" not in listed


def test_training_takes_no_extra_and_no_tokenizer_that_it_does_not_use():
    found, _ = imported_by(
        "import gregale.programs.train.command",
        "import gregale; assert all(hasattr(gregale, name) for name in gregale.__all__)",
    )
    assert {"jax", "haliax"} <= found, "the list would show them"
    assert not found & (EXTRAS | {"tokenizers", "grain", "jinja2"})
    assert set(gregale.__all__) == {*gregale._MODULES, "__version__"} <= set(dir(gregale))
    assert not hasattr(gregale, "trian")
