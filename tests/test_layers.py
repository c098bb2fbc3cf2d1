"""Imports point down the layers of the design, modules stay small, and the list of slow tests has no absent name."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import SLOW, TESTS

SOURCE = Path(__file__).parent.parent / "src" / "gregale"

LAYERS = [
    {"version", "errors", "settings", "atomic_files", "formatting", "scopes", "streams", "terminal", "storage", "axes"},
    {"model", "data", "optim", "codecs", "cost", "timeline", "failures"},
    {"communication", "huggingface", "inference", "evaluation", "objectives"},
    {"methods"},
    {"distributed"},
    {"training", "checkpoint", "tracking", "web"},
    {"runs"},
    {"programs"},
    {"islands"},
    {"cli", "__main__"},
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS, 1) for name in names}
LONGEST_MODULE_LINES = 900


def folder_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imported_folders(tree: ast.AST) -> set[str]:
    """The parts of gregale that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names = [node.module] if node.module != "gregale" else [f"gregale.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("gregale.")}
    return found


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in MODULES}


def test_imports_point_down_the_layers(trees):
    assert imported_folders(ast.parse("def f():\n    from gregale.programs.train import main")) == {"programs"}
    for path, tree in trees.items():
        own = LAYER_OF[folder_of(path)]
        for folder in imported_folders(tree):
            assert LAYER_OF[folder] <= own, f"{path} (layer {own}) imports gregale.{folder} (layer {LAYER_OF[folder]})"


def test_no_folders_import_each_other(trees):
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        graph.setdefault(folder_of(path), set()).update(imported_folders(tree) - {folder_of(path)})
    TopologicalSorter(graph).prepare()  # raises `CycleError`


NAME_OF = {
    path: ".".join(("gregale", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in [SOURCE / "__init__.py", *MODULES]
}


def imported_modules(tree: ast.AST) -> set[str]:
    """The modules of gregale that a module imports, also inside functions and for types alone."""
    found, names = set(), set(NAME_OF.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in names}
        if isinstance(node, ast.ImportFrom) and node.module in names:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & names
            found |= set() if whole <= names else {node.module}
    return found


def test_no_modules_import_each_other(trees):
    late = "def f():\n    from gregale.axes import layout\nif TYPE_CHECKING:\n    from gregale.errors import UserError"
    assert imported_modules(ast.parse(late)) == {"gregale.axes.layout", "gregale.errors"}
    graph = {NAME_OF[path]: imported_modules(tree) for path, tree in trees.items()}
    graph["gregale"] = imported_modules(ast.parse((SOURCE / "__init__.py").read_text()))
    TopologicalSorter(graph).prepare()  # raises `CycleError`


def test_modules_stay_small():
    long = {path: lines for path in MODULES if (lines := len(path.read_text().splitlines())) > LONGEST_MODULE_LINES}
    assert long == {}


def test_slow_tests_are_there():
    assert [path for path in SLOW if not (TESTS / path).exists()] == []


def prints(tree: ast.AST) -> list[int]:
    """Lines that print what is no JSON, or make a console of Rich's own."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            first = ast.unparse(node.args[0]) if node.args else ""
            found += [] if first.startswith("json.dumps(") else [node.lineno]
        if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
            found += [node.lineno] * any(alias.name == "Console" for alias in node.names)
    return found


def test_text_reaches_terminals_through_streams_and_terminal_alone(trees):
    """Names in it may have characters that a terminal acts upon: `say` and `gregale.terminal.Console` show them."""
    may_print = ("streams.py", "cli/__init__.py")
    found = {path: prints(tree) for path, tree in trees.items() if str(path.relative_to(SOURCE)) not in may_print}
    assert {path: lines for path, lines in found.items() if lines} == {}


def asked_kinds(tree: ast.AST) -> list[str]:
    """Where a module asks an object whether it is of a method's, its state's or its configuration's class."""
    kinds = ("Psdp", "Diloco", "StreamingDiloco")
    asked = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "type"):
            words = {name.id for each in node.args for name in ast.walk(each) if isinstance(name, ast.Name)}
            asked += sorted(word for word in words for kind in kinds if word in (kind, f"{kind}Config", f"{kind}State"))
    return asked


def test_only_methods_know_of_what_kind_a_method_is(trees):
    assert asked_kinds(ast.parse("isinstance(a, Psdp | DilocoState)")) == ["DilocoState", "Psdp"]
    found = {path: asked_kinds(tree) for path, tree in trees.items() if folder_of(path) != "methods"}
    assert {path: kinds for path, kinds in found.items() if kinds} == {}


# The classes of pieces that a registry or a configuration chooses, or that a user writes; all their subclasses too.
PIECES = {"ChoiceRegistry", "Method", "Optimizer", "Codec", "ExactReducer", "QuantisedReducer", "Tokenizer", "Callback"}
PIECES |= {"Tracker", "Llama", "UncachedDecoder", "Lora", "ExpertMatrices"}
NO_PIECES = {"device", "devices", "error", "sys", "level", "value", "array"}  # `level`: a schema of PyArrow
NO_PIECES |= {"super", "'fget'", "'__code__'"}  # Python's classes and functions
OWN_RULES = ("islands/", "programs/island/", "programs/plan/island.py")
# The lines that are left, by file, and why.
ASKED = {
    "cli/invocation.py": 1,  # a plugin's section of settings may be any dataclass
    "huggingface/config.py": 1,  # compares all parts of a model with those of a family, configurations among them
    "inference/generate.py": 1,  # a cache of a plugin's model has no base class
    "methods/config.py": 2,  # refuses a plugin's wrong method; an optimizer from Python becomes an outer one
    "model/adapters.py": 2,  # nodes of a model, most of which are Haliax's
    "model/config.py": 1,  # `ModelMethods`: a model is an Equinox module of any class
    "programs/runtime/trained_model.py": 1,  # transformers has models of the Llama family alone
    "programs/runtime/setup.py": 1,  # refuses what is no callback
    "programs/train/loop.py": 1,  # an event of a callback by its name; the base class has all
    "runs/stages.py": 1,  # fields of two choices, one of which may lack them
    "settings/decoding.py": 1,  # fields of a default, which may be absent
    "settings/__init__.py": 1,  # a key of a rule, which another choice lacks
    "tracking/callback.py": 1,  # an event of a callback by its name
}


def piece_classes(trees: dict[Path, ast.AST]) -> set[str]:
    """The names of `PIECES` and of all classes that derive from them."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, before = set(PIECES), set()
    while found != before:
        before = set(found)
        found |= {each.name for each in classes if {ast.unparse(base).split(".")[-1] for base in each.bases} & before}
    return found


def asked_pieces(tree: ast.AST, pieces: set[str]) -> set[int]:
    """The lines that ask an object for its class, or for an attribute that it may lack, or call a method by name."""
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), node.args
        words = [[each.id for each in ast.walk(one) if isinstance(each, ast.Name)] for one in arguments[:2]]
        of_class = name in ("isinstance", "issubclass") and not pieces.isdisjoint(words[1])
        by_default = name == "getattr" and (len(arguments) == 3 or isinstance(arguments[1], ast.Constant))
        may_lack = (name == "hasattr" or by_default) and NO_PIECES.isdisjoint([*words[0], ast.unparse(arguments[1])])
        if of_class or may_lack or (isinstance(node.func, ast.Call) and name.startswith("getattr(")):
            lines.add(node.lineno)
    return lines


def test_pieces_say_what_they_can(trees):
    """General code asks no piece for its class or its attributes: the base class has a property with a default."""
    pieces = piece_classes(trees)
    assert {"LoraConfig", "StreamingDilocoConfig", "BpeConfig"} <= pieces
    text = "isinstance(a, LoraConfig | int)\nhasattr(a.b, 'c')\ngetattr(a, 'b', 1)\ngetattr(a, b)()\nisinstance(a, str)"
    assert asked_pieces(ast.parse(text), pieces) == {1, 2, 3, 4}
    found = {str(path.relative_to(SOURCE)): len(asked_pieces(tree, pieces)) for path, tree in trees.items()}
    assert {path: lines for path, lines in found.items() if lines and not path.startswith(OWN_RULES)} == ASKED
    assert sum(ASKED.values()) <= 15
