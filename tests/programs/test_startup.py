"""What is imported when: nothing heavy before it is needed. Modules are counted, never seconds."""

import subprocess
import sys

import gregale
from tests.runs.runs import write_run

HEAVY = {"jax", "numpy", "haliax", "equinox", "optax", "draccus", "orbax", "grain", "tokenizers", "tensorstore", "rich"}
EXTRAS = {"wandb", "trackio", "tensorboardX", "pyarrow", "datasets"}


def imported_by(program: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running a program."""
    program += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_nothing_heavy(tmp_path):
    arguments = ["--help"], ["--version"], ["trian"]
    found = imported_by(f"from gregale.cli import main; print(*map(main, {arguments}))")
    assert "gregale" in found
    assert not found & (HEAVY | EXTRAS)
    write_run(tmp_path / "run", 1, saved=1)
    assert "jax" not in imported_by(f"from gregale.cli import main; main(['runs', {str(tmp_path)!r}])")


def test_the_package_imports_its_names_when_they_are_used():
    assert not imported_by("import gregale; gregale.UserError; gregale.setting") & (HEAVY | EXTRAS)
    assert "jax" in imported_by("import gregale; assert all(hasattr(gregale, name) for name in gregale.__all__)")
    assert set(gregale.__all__) == {*gregale._MODULES, "__version__"} <= set(dir(gregale))
    assert not hasattr(gregale, "trian")


def test_training_takes_no_extra_and_no_tokenizer_that_it_does_not_use():
    found = imported_by("import gregale.programs.train.command")
    assert {"jax", "haliax"} <= found, "the list would show them"
    assert not found & (EXTRAS | {"tokenizers", "grain", "jinja2"})
