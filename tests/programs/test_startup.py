"""What is imported when: nothing heavy before it is needed. Modules are counted, never seconds."""

import subprocess
import sys

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


def test_training_takes_no_extra_and_no_tokenizer_that_it_does_not_use():
    found = imported_by("import gregale.programs.train.command")
    assert {"jax", "haliax"} <= found, "the list would show them"
    assert not found & (EXTRAS | {"tokenizers", "grain"})
