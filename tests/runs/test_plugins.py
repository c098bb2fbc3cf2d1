"""Modules of one's own: imported before the configuration is decoded, and one clear line for each mistake."""

import os
import sys
from dataclasses import replace
from typing import Any

import pytest

from gregale.cli import main
from gregale.cli.invocation import bound
from gregale.errors import UserError
from gregale.programs.exporting import ExportOptions
from gregale.programs.tokenize import COMMAND
from gregale.runs import parsing
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import dump, load
from gregale.runs.process_agreement import process_terms
from gregale.runs.run_directory import RunDirectory
from tests.docs.pages import ROOT, blocks
from tests.plugins import plugins_from
from tests.programs.tiny import finished, start

MODULE = """
from dataclasses import dataclass
from gregale.model.config import ModelConfig
from gregale.settings import setting

@ModelConfig.register_subclass("mine")
@dataclass(frozen=True)
class Mine(ModelConfig):
    deep: bool = setting(False, "whether it is deep")
"""
YAML = "name: a\nsteps: 1\nplugins: [my_model]\nmodel: {type: mine}\n"
TAKEN = MODULE.replace('"mine"', '"llama"')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module and a configuration; the current one."""
    (tmp_path / "my_model.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    with plugins_from(tmp_path):
        sys.path.remove(str(tmp_path))
        yield tmp_path


def invoked(*arguments: str) -> TrainConfig:
    """The configuration that a command gets."""
    found = []
    command = replace(COMMAND, main=lambda options, config: found.append(config) or 0)
    assert bound("tokenize", command, arguments)() == 0
    return found[0]


def test_modules_of_the_current_folder_are_imported_before_the_keys_are_read(folder):
    config = invoked("run.yaml", "--model.deep", "--steps", "2")
    model: Any = config.model
    assert (type(model).__name__, model.deep, config.steps) == ("Mine", True, 2)
    (folder / "again.yaml").write_text(dump(config))
    assert load(TrainConfig, folder / "again.yaml") == config


def test_a_pipe_is_read_once(folder):
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as file:
        file.write(YAML)
        file.close()
        assert type(invoked(f"/dev/fd/{reading}").model).__name__ == "Mine"


def test_help_has_the_keys_of_the_files_plugins(folder, capsys):
    assert main(["train", "run.yaml", "--help", "model"]) == 0
    assert "whether it is deep" in capsys.readouterr().out


def test_the_section_and_the_command_of_a_plugin_on_its_page(folder):
    page = (ROOT / "docs" / "extending.md").read_text()
    (folder / "racks.py").write_text(next(each for each in blocks(page, "python") if "register_command" in each))
    (folder / "mine.yaml").write_text("name: a\nsteps: 1\nplugins: [racks]\nracks: {first: 3}\nmesh: {replica: 2}\n")
    assert finished(start(folder, "where", "mine.yaml", "--last")) == (0, "4\n", "")
    assert finished(start(folder, "where", "--plugins", "racks", "--name", "a", "--steps", "1", "--help"))[0] == 0


def test_those_of_the_command_line_replace_those_of_the_file(folder):
    (folder / "run.yaml").write_text(YAML.replace("my_model", "absent"))
    assert invoked("run.yaml", "--plugins", "my_model").plugins == ["my_model"]


MISTAKES = {
    "absent": ("absent", "", "there is no module 'absent'; it was looked for in the installed packages and in /"),
    "absent inside": ("os.absent", "", "there is no module 'os.absent'"),
    "file": ("other.py", "", "'other.py' is no name of a module. Write it as `import` has it"),
    "path": ("folder/other", "", "'folder/other' is no name of a module"),
    "raises": ("other", "\nraise OSError('no\\nluck')", "other.py, line 2): OSError: no luck"),
    "exits": ("other", "import sys; sys.exit('bye')", "other.py, line 1): SystemExit: bye"),
    "syntax": ("other", "a = 1\nb = = 2", "other.py, line 2): SyntaxError: invalid syntax"),
    "lacks a package": ("other", "import absent", "other.py, line 1): ModuleNotFoundError: No module named 'absent'"),
    "taken name": ("other", TAKEN, "other.py, line 6): ValueError: Cannot register <class 'other.Mine'> as llama"),
    "taken codec": (
        "other",
        "from gregale.codecs.codec import register_codec\nregister_codec('int8', print)",
        "other.py, line 2): ValueError: Cannot register the codec int8: the name is taken",
    ),
}


@pytest.mark.parametrize(("name", "code", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_module_is_one_line_with_its_place(folder, name, code, message):
    (folder / "other.py").write_text(code)
    (folder / "run.yaml").write_text(YAML.replace("my_model", name))
    with pytest.raises(UserError) as caught:
        load(TrainConfig, "run.yaml")
    assert str(caught.value).startswith("`plugins` (run.yaml, line 3): ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (sys.modules.get(name) is None) or name == "os"


BASE = """
from gregale.tracking.callback import Callback
class Parent(Callback):
    def joined(self): ...
class Mine(Parent):
"""
MISSPELT = {
    "two letters": ("def on_setp(self, step, metrics): ...", "on_step"),
    "one letter": ("def clos(self): ...", "close"),
    "plural": ("def metric(self, model, batch, execution): ...", "metrics"),
    "property": ("@property\n    def on_edn(self): ...", "on_end"),
    "class method": ("@classmethod\n    def colse(cls): ...", "close"),
    "private": ("def _clos(self): ...", None),
    "beside the method": ("def clos(self): ...\n    def close(self): ...", None),
    "singular without arguments": ("def metric(self): ...", None),
    "parent's": ("def joined(self): ...", None),
    "close to no method of Gregale": ("def joine(self): ...", None),
    "a field": ("clos: int = 1", None),
}


@pytest.mark.parametrize(("code", "meant"), MISSPELT.values(), ids=MISSPELT)
def test_a_method_whose_name_is_nearly_one_of_gregale_is_refused(folder, code, meant):
    (folder / "helper.py").write_text(f"{BASE}    {code}\n")
    (folder / "my_model.py").write_text(f"import helper\n{MODULE}")
    if meant is None:
        parsing.import_plugins(["my_model"])
        return
    for name in ("my_model", "helper"):  # a module that a plugin imports, and a module that is imported already
        with pytest.raises(UserError, match=rf"`plugins`: Mine\.\w+ \(.*helper.py, line 6\) .* Write `{meant}`, or"):
            parsing.import_plugins([name])


def test_a_value_that_is_no_list_is_refused(folder):
    (folder / "run.yaml").write_text(YAML.replace("[my_model]", "my_model"))
    with pytest.raises(UserError, match=r"`plugins` \(run.yaml, line 3\) is 'my_model', a str; expected list of str"):
        load(TrainConfig, "run.yaml")


@pytest.mark.parametrize("where", ["another user", "a store"])
def test_a_run_from_elsewhere_imports_only_what_the_command_line_names(folder, where, monkeypatch, request):
    path = request.getfixturevalue("s3") if where == "a store" else folder / "runs"
    run = RunDirectory(path / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_bytes(YAML.encode())
    if where != "a store":
        owner = os.stat(str(run.config)).st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        if owner == 0:
            monkeypatch.setattr(parsing, "TRUSTED", ())
    with pytest.raises(UserError, match=r"names plugins \(my_model\), which are code, and it .*`--plugins my_model`"):
        run.read_config()
    assert "my_model" not in sys.modules
    parsing.import_plugins(["my_model"])
    assert type(run.read_config().model).__name__ == "Mine"


def test_a_module_that_starts_jax_is_refused(folder, monkeypatch):
    started = iter([False, True])
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: next(started))
    with pytest.raises(UserError, match="'my_model' computes with JAX when it is imported, before the devices"):
        parsing.import_plugins(["my_model"])


def test_an_unknown_choice_is_refused_with_the_way_to_add_it(folder):
    (folder / "run.yaml").write_text(YAML.replace("plugins: [my_model]\n", ""))
    with pytest.raises(UserError, match=r"`model.type` is 'mine' .* One of your own needs its module in `plugins`\."):
        load(TrainConfig, "run.yaml")


def test_processes_compare_the_code(folder):
    config = load(TrainConfig, folder / "run.yaml")
    first = process_terms(config)["plugins: my_model"]
    with (folder / "my_model.py").open("a") as file:
        file.write("# other\n")
    assert process_terms(config)["plugins: my_model"] != first
    assert "plugins: my_model" not in process_terms(ExportOptions(run="a", target="b"))
