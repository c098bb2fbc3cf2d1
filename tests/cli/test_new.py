"""`gregale new` writes copies of the examples in config/, also where Gregale was installed from a wheel."""

import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

from gregale.cli import main
from gregale.errors import install_hint
from gregale.programs.new import Devices, NewOptions, configuration
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "config").glob("*.yaml"))


def test_a_starter_is_a_copy_of_an_example_and_replaces_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "first.yaml"]) == 0
    assert (tmp_path / "first.yaml").read_text() == (ROOT / "config" / "quickstart.yaml").read_text()
    for example in EXAMPLES:
        assert main(["new", f"{example.stem}.yaml", "--from", example.stem]) == 0
        assert (tmp_path / example.name).read_bytes() == example.read_bytes()
    capsys.readouterr()
    for arguments, words in (
        (["first.yaml", "--from", "islands"], "first.yaml cannot be made: File exists."),
        (["other.yaml", "--from", "quikstart"], "Did you mean `quickstart`?"),
        (["no/other.yaml"], "no/other.yaml cannot be made: No such file"),
    ):
        assert main(["new", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"first.yaml", *(path.name for path in EXAMPLES)}


@pytest.mark.parametrize(
    ("devices", "size", "model", "batch"),
    [
        (Devices("cpu", 1, 10**10), 10**5, (4, 128, {"type": "bytes"}), (16, 256)),
        (Devices("cpu", 1, 10**10), 10**8, (4, 128, {"type": "bpe", "vocabulary": 16384}), (16, 256)),
        (Devices("gpu", 1, 80 * 10**9), 2 * 10**6, (4, 128, {"type": "bytes"}), (32, 1024)),
        (Devices("gpu", 8, 80 * 10**9), 10**10, (16, 1024, {"type": "bpe", "vocabulary": 32768}), (256, 1024)),
        (Devices("gpu", 1, 10**9), 10**10, (6, 256, {"type": "bpe", "vocabulary": 32768}), (32, 1024)),
    ],
)
def test_a_configuration_fits_text_and_devices(devices, size, model, batch, tmp_path, monkeypatch):
    """Its state fits the memory, its tokens teach its parameters; a processor has minutes, not hours."""
    monkeypatch.chdir(tmp_path)
    with open("notes.txt", "wb") as file:
        file.truncate(size)
    content, _ = configuration(NewOptions("my.yaml", text=["*.txt"]), "my", devices)
    (tmp_path / "my.yaml").write_text(content)
    config = load(TrainConfig, "my.yaml")
    assert (config.model.layers, config.model.hidden, yaml.safe_load(content)["data"]["tokenizer"]) == model
    assert (config.batch.size, config.batch.sequence_length) == batch
    assert config.cpu_devices is None, "a GPU box trains on its GPUs"


def test_conversations_fit_a_sequence_and_a_model_brings_its_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.jsonl").write_text('{"messages": "' + 700 * "a" + '"}\n')
    (tmp_path / "model").mkdir()
    tokenizer = {"type": "file", "path": "model/tokenizer.json"}
    (tmp_path / "model" / "config.yaml").write_text(yaml.safe_dump({"data": {"tokenizer": tokenizer}}))
    assert main(["new", "my.yaml", "--chat", "talks.jsonl", "--from", "model"]) == 0
    assert "adapters beside the model of model, 0.00072 MB in 1 file(s), 200 steps" in capsys.readouterr().out
    found = yaml.safe_load((tmp_path / "my.yaml").read_text())
    assert (found["start_from"], found["data"]["tokenizer"], found["batch"]["sequence_length"]) == (
        "model",
        tokenizer,
        1024,
    )
    load(TrainConfig, "my.yaml")
    for arguments, words in (
        (["--text", "a", "--chat", "b"], "text and chat are both given"),
        (["--text", "none*"], "text: no file matches none*"),
        (["--text", "talks.jsonl"], "talks.jsonl has conversations; give --chat"),
        (["--chat", "model/config.yaml"], "no file of JSON lines"),
        (["--text", "[talks.jsonl, model/config.yaml]"], "of several kinds (jsonl, text)"),
    ):
        assert main(["new", "other.yaml", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "other.yaml").exists()


def test_outside_of_a_clone_the_packages_of_an_extra_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("gregale.errors.__file__", str(tmp_path / "lib" / "gregale" / "errors.py"))
    monkeypatch.setattr(sys, "executable", "/opt/python")
    hint = install_hint("formats")
    assert hint.startswith("Run `/opt/python -m pip install ")
    assert [word.strip("'").partition(">=")[0] for word in hint.strip("`.").split()[5:]] == ["pyarrow", "zstandard"]


def test_every_data_file_is_named_for_the_wheel():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package, patterns in named.items():
        folder = ROOT / "src" / package.replace(".", "/")
        assert all(any(folder.glob(pattern)) for pattern in patterns), package
    for path in (ROOT / "src" / "gregale").rglob("*.*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT / "src").parts)
            assert any(path.match(pattern) for pattern in named.get(package, ())), path


@pytest.mark.soak
def test_a_wheel_has_every_module_and_every_data_file(tmp_path):
    """Data files are the examples too, which are a link in the source."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    content = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gregale/")}
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "gregale").rglob("*")}
    files = {name for name in source if (ROOT / "src" / name).is_file() and "__pycache__" not in name}
    starters = {f"gregale/starters/{path.name}" for path in (*EXAMPLES, *(ROOT / "config").glob("*.jsonl"))}
    assert content == files | starters
    assert {"gregale/py.typed", "gregale/web/page.js", "gregale/cost/kernel_cycles.json"} <= content
