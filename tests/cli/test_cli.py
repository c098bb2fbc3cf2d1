"""The command line, in this process with toy programs."""

import io
import signal
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

import gregale
from gregale.cli import PROGRAMS, Program, main
from gregale.errors import Interrupted, UserError
from gregale.programs.command import Command


@dataclass(frozen=True)
class Options:
    fresh: bool = field(default=False, metadata={"help": "refuse to resume"})
    topology: str | None = field(default=None, metadata={"help": "devices to plan for"})


@dataclass(frozen=True)
class Model:
    layers: int = field(default=2, metadata={"help": "number of layers"})
    tied: bool = field(default=False, metadata={"help": "one table"})
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"help": "decays"})
    is_at_hub: ClassVar[bool] = False


@dataclass(frozen=True)
class Config:
    name: str = field(metadata={"help": "name of the run"})
    model: Model = field(default=Model(), metadata={"help": "the model"})


@dataclass(frozen=True)
class SampleOptions:
    run: str
    prompt: str = ""
    temperature: float = 1.0


@dataclass(frozen=True)
class ManyOptions:
    where: str
    runs: tuple[str, ...] = ()
    short: bool = False


@dataclass(frozen=True)
class NoOptions:
    pass


class Calls(list):
    """Toy programs that note how they were called, and what `main` returned."""

    def __init__(self):
        names: dict = {"calls": self}  # `fail` has a file of Gregale's, as a program with a defect
        exec(compile("def fail(options):\n    raise calls.error\n", gregale.__file__, "exec"), names)
        commands = {
            "train": Command(self.note, Options, Config, positional=("config",)),
            "sample": Command(self.note, SampleOptions, positional=("run", "prompt")),
            "many": Command(self.note, ManyOptions, positional=("where", "runs")),
            "bare": Command(self.note, NoOptions),
            "fail": Command(names["fail"], Options),
        }
        self.modules = {f"toy_{name}": types.SimpleNamespace(COMMAND=command) for name, command in commands.items()}
        self.programs = {name: Program(f"toy_{name}", f"runs {name}") for name in commands}
        self.error: BaseException | None = None

    def note(self, *arguments):
        self.append(arguments)
        return 3

    def main(self, *arguments: str) -> int:
        return main(arguments, self.programs)


@pytest.fixture
def calls(monkeypatch):
    calls = Calls()
    for name, module in calls.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\n")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ([], Options(), Config("a")),
        (["--fresh"], Options(fresh=True), Config("a")),
        (["--name", "b", "--model.layers=3"], Options(), Config("b", Model(3))),
        (["--topology", "v5e:4x4", "--model.tied"], Options(topology="v5e:4x4"), Config("a", Model(tied=True))),
    ],
)
def test_keys_go_to_the_options_or_the_configuration(calls, config, arguments, options, expected):
    assert calls.main("train", config, *arguments) == 3
    assert calls.main("train", *arguments, config) == 3, "the file may come last: a flag takes no word"
    assert calls == [(options, expected)] * 2


def test_words_fill_the_options_in_order(calls):
    calls.main("sample", "runs/a", "once: upon, [a]", "--temperature", "0.5")
    calls.main("sample", "runs/a", "")
    calls.main("sample", "--run=runs/a")
    assert calls.main("bare") == 3
    sampled = SampleOptions("runs/a", "once: upon, [a]", 0.5), *[SampleOptions("runs/a")] * 2
    assert calls == [(each,) for each in (*sampled, NoOptions())]


def test_the_last_words_fill_a_list(calls, capsys):
    calls.main("many", "here", "a", "--short", "b, [c]", "3")
    calls.main("many", "here")
    assert calls == [(ManyOptions("here", ("a", "b, [c]", "3"), True),), (ManyOptions("here"),)]
    assert calls.main("many") == 2
    assert "WHERE is missing. Usage: gregale many WHERE [RUNS] ... [--key value ...]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["\x1b[2J\ngregale: well"], "gregale: error: there is no command `\\x1b[2J\\ngregale: well`."),
        (["trian"], "there is no command `trian`. Did you mean `train`? Commands: train, sample, many, bare, fail."),
        (["train"], "CONFIG is missing. Usage: gregale train CONFIG [--key value ...]"),
        (["train", "{config}", "more"], "'more' is one word too many. Usage: gregale train CONFIG"),
        (["train", "{config}", "--model.betas", "0.9", "0.98"], "with commas: `--model.betas 0.9,0.98`"),
        (["train", "--model.betas", "0.9", "0.98", "{config}"], "with commas: `--model.betas 0.9,0.98`"),
        (["train", "--model.betas", "0.9", "0.98"], "with commas: `--model.betas 0.9,0.98`"),
        (["train", "--model.betas", "0.9,0.98", "no.yaml"], "no.yaml: there is no such configuration file"),
        (["train", "{config}", "--frehs"], "`frehs` (on the command line) is not a valid key"),
        (["sample"], "RUN is missing. Usage: gregale sample RUN [PROMPT] [--key value ...]"),
        (["sample", "a", "--run", "b"], "run is given twice"),
        (["sample", ""], "RUN is empty. Usage: gregale sample RUN [PROMPT] [--key value ...]"),
        (["train", ""], "CONFIG is empty. Usage: gregale train CONFIG"),
        (["many", "here", "a", ""], "RUNS is empty. Usage: gregale many WHERE [RUNS] ..."),
        (["fail"], "steps is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_paragraph_and_exit_code_2(calls, config, capsys, arguments, message):
    calls.error = UserError("steps is 0")
    assert calls.main(*(argument.format(config=config) for argument in arguments)) == 2
    output = capsys.readouterr()
    assert output.err.startswith("gregale: error: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert not calls


def test_an_interrupt_ends_with_130_and_other_errors_pass(calls, capsys):
    calls.error = KeyboardInterrupt()
    assert calls.main("fail") == 130
    assert capsys.readouterr().err == "gregale: interrupted\n"
    calls.error = Interrupted(143)
    assert (calls.main("fail"), capsys.readouterr().err) == (143, ""), "the signal was reported"
    for calls.error in (RuntimeError("a bug"), JaxRuntimeError("INTERNAL: a bug")):
        with pytest.raises(RuntimeError, match="a bug"):
            calls.main("fail")


def test_an_interrupt_while_python_ends_shows_no_traceback():
    program = (
        "import atexit, os, signal, sys; from gregale.cli import main; sys.argv = ['gregale', '--version']; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # as where nobody ignores it, unlike `nohup`
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); sys.exit(main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
    assert ended.stdout == f"gregale {gregale.__version__}\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_is_reported_while_a_command_is_imported_and_then_is_the_programs(tmp_path, name):
    kill, number = f"os.kill(os.getpid(), signal.{name})", signal.Signals[name]
    (tmp_path / "early.py").write_text(f"import os, signal\n{kill}\n")
    (tmp_path / "late.py").write_text(
        "import os, signal\nfrom dataclasses import make_dataclass\nfrom gregale.programs.command import Command\n"
        f"COMMAND = Command(lambda _: {kill}, make_dataclass('None_', ()))\n"
    )
    program = (
        "import signal, sys; from gregale.cli import Program, main; "
        f"signal.signal(signal.SIGHUP, signal.SIG_DFL); sys.path.append({str(tmp_path)!r}); "
        "sys.exit(main(programs={name: Program(name, '') for name in ('early', 'late')}))"
    )
    told = f"gregale: {name}: there is nothing to save, and the command ends.\n"
    for command, ended_with in (("early", (128 + number, told)), ("late", (-number, ""))):
        ended = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == ended_with


def test_the_end_of_a_process_waits_for_no_compiler():
    program = (
        "import os, sys, threading, time; from gregale.cli import main; from gregale.streams import LEFT_AT_EXIT; "
        "threading.Thread(target=lambda: (time.sleep(60), os._exit(3)), name=LEFT_AT_EXIT).start(); "
        "sys.argv = ['gregale', '--version']; sys.exit(main())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"gregale {gregale.__version__}\n", "")


def test_help_names_every_option_and_key(calls, capsys):
    assert calls.main("train", "--fresh", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["usage: gregale train CONFIG [--key value ...]", "", "runs train"]
    assert lines.index("options:") < lines.index("  --topology  str | null = null  devices to plan for")
    assert lines.index("keys of the YAML file, each also an argument:") < lines.index(
        "  --name  str (required)  name of the run"
    )
    assert calls.main("bare", "-h") == 0
    assert capsys.readouterr().out == "usage: gregale bare [--key value ...]\n\nruns bare\n"
    assert not calls


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"  {name} " in overview and program.summary in overview for name, program in PROGRAMS.items())
    assert main([]) == 0
    assert capsys.readouterr().out == overview
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gregale {gregale.__version__}\n"


def test_deprecations_are_silent_unless_they_are_asked_for(calls, monkeypatch):
    def shown() -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls.main("bare")
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            warnings.warn("new", UserWarning, stacklevel=1)
        return len(caught)

    monkeypatch.setattr(sys, "warnoptions", [])
    assert shown() == 1
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    assert shown() == 2


class JaxRuntimeError(RuntimeError):
    """Named as JAX names its own: an error is told apart by that and by its text."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "the memory does not suffice. `gregale plan CONFIG` tells"),
        (
            JaxRuntimeError("INTERNAL: Error: Out of memory allocating 34359738368 bytes."),
            "the memory does not suffice: 34,359,738,368 bytes were asked for at once. `gregale plan",
        ),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: too much"), "the memory does not suffice. `gregale plan"),
        (
            UnicodeEncodeError("latin-1", "runs/\u5317", 5, 6, "no such character"),
            "the encoding latin-1 of this locale cannot write '\u5317'. With PYTHONUTF8=1",
        ),
    ],
)
def test_what_the_machine_cannot_do_is_told_in_one_line(calls, capsys, error, message):
    calls.error = error
    assert calls.main("fail") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"gregale: error: {message}")
    assert told.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_show_ends_nothing(calls, monkeypatch, encoding):
    """Samples, help and messages: a character that the encoding lacks is a question mark."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(calls, "note", lambda *_: print("\u5317 wind"))
    commands = {**calls.programs, "say": Program("toy_say", "\u5317")}
    monkeypatch.setitem(sys.modules, "toy_say", types.SimpleNamespace(COMMAND=Command(calls.note, NoOptions)))
    main(["say"], commands)
    main(["say", "--help"], commands)
    main(["\u5317"], commands)
    for stream in (out, err):
        stream.flush()
    assert out.buffer.getvalue().startswith(b"? wind\nusage: gregale say [--key value ...]\n\n?\n")
    assert err.buffer.getvalue().startswith(b"gregale: error: there is no command `?`.")


def test_an_argument_is_what_was_typed_whatever_the_locale_made_of_it(calls, capsys):
    as_ascii = "n\u00f6 \u5317".encode().decode("ascii", "surrogateescape")
    calls.main("sample", "runs/a", as_ascii)
    assert calls == [(SampleOptions("runs/a", "n\u00f6 \u5317"),)]
    assert calls.main("sample", b"\xff".decode("utf-8", "surrogateescape")) == 2
    assert capsys.readouterr().err == "gregale: error: the argument b'\\xff' is not UTF-8 at byte 0.\n"
