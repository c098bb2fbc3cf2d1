"""Configurations from YAML and arguments: what comes out, and the one paragraph that a mistake gets."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import draccus
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.errors import UserError
from gregale.runs.parsing import dump, load, split_arguments


@dataclass(frozen=True)
class Shape(draccus.ChoiceRegistry):
    size: float = field(default=1.0, metadata={"help": "how large"})

    @classmethod
    def default_choice_name(cls):
        return "disc"


@Shape.register_subclass("disc")
@dataclass(frozen=True)
class Disc(Shape):
    holes: int = field(default=0, metadata={"help": "how many holes"})

    def __post_init__(self):
        if self.holes < 0:
            raise UserError(f"shape.holes is {self.holes}; it has to be at least 0.")


@Shape.register_subclass("bar")
@dataclass(frozen=True)
class Bar(Shape):
    size: float = field(default=3.0, metadata={"help": "how long"})
    ends: tuple[float, float] = field(default=(0.0, 1.0), metadata={"help": "where it ends"})


@dataclass(frozen=True)
class Mesh:
    data: int = field(default=1, metadata={"help": "devices for data"})
    model: int = field(default=1, metadata={"help": "devices for layers"})


@dataclass(frozen=True)
class Source:
    path: str = field(metadata={"help": "where it is"})
    weight: float = field(default=1.0, metadata={"help": "how often"})


@dataclass(frozen=True)
class Run:
    name: str = field(metadata={"help": "name of the run"})
    steps: int = field(default=10, metadata={"help": "how long"})
    rate: float = field(default=0.1, metadata={"help": "how fast"})
    flag: bool = field(default=False, metadata={"help": "whether"})
    limit: float | None = field(default=1.0, metadata={"help": "null: none"})
    either: int | str = field(default=1, metadata={"help": "a number or a word"})
    folder: Path = field(default=Path("runs"), metadata={"help": "where"})
    words: list[str] = field(default_factory=list, metadata={"help": "some words"})
    numbers: tuple[int, ...] = field(default=(1, 2), metadata={"help": "some numbers"})
    mesh: Mesh = field(default=Mesh(data=4), metadata={"help": "the mesh"})
    second_mesh: Mesh | None = field(default=None, metadata={"help": "another one"})
    shape: Shape = field(default=Bar(), metadata={"help": "the shape"})
    sources: dict[str, Source] = field(default_factory=dict, metadata={"help": "the data"})
    more: tuple[Source, ...] = field(default=(), metadata={"help": "more data"})


@pytest.fixture
def parse(tmp_path):
    """YAML text and arguments -> configuration, through a real file."""

    def parse(text: str, *arguments: str, config_class=Run):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load(config_class, path, arguments)

    return parse


def test_yaml_fills_fields_and_what_is_left_out_keeps_its_default(parse):
    assert parse("name: a") == Run(name="a")
    run = parse("name: a\nsteps: 1e3\nrate: 1e-3\nlimit: null\nmesh: {model: 2}\nshape: {type: disc, size: 2}")
    assert run == Run("a", 1000, 0.001, limit=None, mesh=Mesh(data=4, model=2), shape=Disc(size=2.0))
    assert type(run.shape.size) is float


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--steps=5", "--steps=1_000"], {"steps": 1000}),
        (["--rate", "-1e-3"], {"rate": -0.001}),
        (["--flag"], {"flag": True}),
        (["--limit", "null"], {"limit": None}),
        (["--name", "null"], {"name": "null"}),
        (["--either", "7"], {"either": 7}),
        (["--words", "*.py,b"], {"words": ["*.py", "b"]}),
        (["--words", "[a, 'b,c']"], {"words": ["a", "b,c"]}),
        (["--numbers", "5"], {"numbers": (5,)}),
        (["--mesh", "{model: 2}"], {"mesh": Mesh(data=4, model=2)}),
        (["--second_mesh.data", "2"], {"second_mesh": Mesh(data=2)}),
        (["--shape.ends", "1,2.5"], {"shape": Bar(ends=(1.0, 2.5))}),
        (["--shape.type", "disc"], {"shape": Disc()}),
        (["--sources.web.path", "p", "--sources.web.weight", "2"], {"sources": {"web": Source("p", 2.0)}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_override(parse, arguments, changes):
    assert parse("name: a", *arguments) == Run(**{"name": "a"} | changes)


def test_arguments_go_on_top_of_the_file(parse):
    run = parse("name: a\nmore: [{path: p}]", "--more", "[{path: p}, {path: q, weight: 3}]")
    assert run.more == (Source("p"), Source("q", 3.0))
    assert parse("name: a\nshape: {type: bar, size: 5}", "--shape.type", "disc").shape == Disc(size=5.0)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--mesh", "{data: 3}"], {"mesh": Mesh(3, 7)}),
        (["--mesh", "{data: 3}", "--mesh.model", "2"], {"mesh": Mesh(3, 2)}),
        (["--shape", "{ends: [0, 9]}"], {"shape": Bar(5.0, (0.0, 9.0))}),
        (["--shape", "{type: bar, ends: [0, 9]}"], {"shape": Bar(5.0, (0.0, 9.0))}),
        (["--shape", "{type: disc, holes: 2}"], {"shape": Disc(1.0, 2)}),
        (["--sources.web", "{weight: 2}"], {"sources": {"web": Source("p", 2.0)}}),
        (["--sources", "{other: {path: q}}"], {"sources": {"other": Source("q")}}),
        (["--second_mesh", "{data: 3}"], {"second_mesh": Mesh(data=3)}),
        (["--name", "{data: 3}"], {"name": "{data: 3}"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_section_is_merged_with_that_of_the_file_unless_its_type_changes(parse, arguments, changes):
    text = "name: a\nmesh: {model: 7, data: 2}\nshape: {size: 5}\nsources: {web: {path: p}}\nsecond_mesh: null"
    assert parse(text, *arguments) == replace(parse(text), **changes)


def test_anchors_and_merges_are_understood(parse):
    run = parse("name: a\nmesh: &mesh {data: 2, model: 3}\nsecond_mesh: {<<: *mesh, model: 4}")
    assert run.second_mesh == Mesh(2, 4)


MISTAKES = {
    "unknown key": (
        "name: a\nstepz: 3",
        [],
        "`stepz` (run.yaml, line 2) is not a valid key at the top. Did you mean `steps`?",
    ),
    "key of another place": ("name: a", ["--ends", "2"], "`ends` (on the command line) .* Did you mean `shape.ends`?"),
    "key of another choice": (
        "name: a\nshape: {type: bar, ends: [0, 1]}",
        ["--shape.type", "disc"],
        "`shape.ends` (run.yaml, line 2) .* with type disc. `ends` belongs to type bar.",
    ),
    "unknown choice": ("name: a\nshape: {type: dics}", [], "`shape.type` is 'dics' (run.yaml, line 2), .* `disc`?"),
    "choice without type": ("name: a\nshape: disc", [], "`shape` .* is 'disc', a str; .* `shape.type`: disc, bar"),
    "wrong type": ("name: a\nsteps: many", [], "`steps` (run.yaml, line 2) is 'many', a str; expected int (how long)."),
    "not a number for int": ("name: a\nsteps: .nan", [], "`steps` .* is nan, a float; expected int"),
    "text for bool": ("name: a\nflag: perhaps", [], "`flag` .* is 'perhaps', a str; expected bool"),
    "base 60": ("name: a\nsteps: 1:30", [], "run.yaml, line 2: `steps` is 1:30, a number to the base 60 .* (90)."),
    "octal": ("name: a\nsteps: 010", [], "run.yaml, line 2: `steps` is 010, an octal number in YAML 1.1 (8). Write"),
    "no octal": ("name: a\nsteps: 08", [], "`steps` (run.yaml, line 2) is '08', a str; expected int"),
    "dots": ("name: a\nmesh.data: 4", [], "`mesh.data` (run.yaml, line 2) .* `--mesh.data`) .* `mesh: {data: 4}`."),
    "mapping for list": (
        "name: a\nmore: {path: p}",
        [],
        "one mapping; expected list of mapping: `more: [{path: 'p'}]`",
    ),
    "no value": ("name: a", ["--steps", "--flag"], "`steps` (on the command line) is true, a bool; expected int"),
    "wrong length": ("name: a", ["--shape.ends", "1,2,3"], "`shape.ends` .* a list of 3; expected [float, float]"),
    "scalar for list": ("name: a\nwords: x", [], "`words` .* is 'x', a str; expected list of str"),
    "no member of a union": ("name: a\neither: [1]", [], "`either` .* is [1], a list of 1; expected int | str"),
    "missing field": ("steps: 1", [], "`name` (name of the run) is missing: .* `--name VALUE`; its type is str."),
    "missing below": ("name: a\nsources: {web: {weight: 1}}", [], "`sources.web.path` (where it is) is missing"),
    "scalar for mapping": ("name: a\nsources: 5", [], "`sources` .* expected mapping of names to mapping"),
    "below a scalar": ("name: a\nsteps: 5", ["--steps.x", "1"], "`steps.x` .* nothing lies below `steps`, .* '5'"),
    "an element of a list": ("name: a", ["--more.0.path", "q"], "`more` is a list, .* as a whole: `--more '[...]'`."),
    "word without key": ("name: a", ["steps"], "'steps' on the command line belongs to no key"),
    "duplicate key": ("name: a\nsteps: 1\nname: b", [], "run.yaml: `name` stands twice, in line 1 and in line 3"),
    "unreadable": ("name: a\nmesh: {data: 1\nsteps: 2", [], "run.yaml, line 3, column 6: not readable as YAML"),
    "unknown tag": ("name: !secret a", [], "run.yaml, line 1, column 7: not readable as YAML: could not determine"),
    "no mapping": ("- a", [], "run.yaml: a configuration is a mapping"),
    "list as key": ("? [a]\n: 1", [], "run.yaml, line 1: a key has to be a single word"),
    "the configuration's own": ("name: a\nshape: {type: disc, holes: -1}", [], "shape.holes is -1; it has to be"),
}


@pytest.mark.parametrize(("text", "arguments", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_gets_one_paragraph(parse, text, arguments, message):
    with pytest.raises(UserError) as caught:
        parse(text, *arguments)
    found = re.sub(r"[^ (`]*run\.yaml", "run.yaml", str(caught.value))
    wanted = ".*".join(map(re.escape, message.replace(" .* ", ".*").split(".*")))
    assert re.search(wanted, found), found
    assert "\n" not in found


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    for name, message in (
        ("nothing.yaml", r"nothing\.yaml: there is no such configuration file"),
        (".", "is a folder, not a configuration file"),
        ("latin.yaml", r"latin\.yaml: not UTF-8 at byte 6"),
    ):
        with pytest.raises(UserError, match=message):
            load(Run, tmp_path / name)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(Mesh, tmp_path / "empty.yaml") == Mesh()


words = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8)


@settings(max_examples=30, deadline=None)
@given(name=words, texts=st.lists(words, max_size=3), rate=st.floats(allow_nan=False), whole=st.integers())
def test_what_is_dumped_loads_back_equal(tmp_path_factory, name, texts, rate, whole):
    parts = {
        "words": texts,
        "numbers": (whole,),
        "second_mesh": Mesh(whole),
        "shape": Disc(rate),
        "more": (Source(name),),
    }
    run = Run(name, whole, rate, limit=None, folder=Path("a/b"), sources={"a": Source(name, rate)}, **parts)
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(run), encoding="utf-8")
    assert load(Run, path) == run


def test_a_dump_has_every_key_and_names_its_choices():
    raw = yaml.safe_load(dump(Run(name="a")))
    assert (raw["shape"], raw["mesh"]) == ({"size": 3.0, "ends": [0.0, 1.0], "type": "bar"}, {"data": 4, "model": 1})


def test_words_and_keys_are_told_apart():
    arguments = ["a.yaml", "--fresh", "b", "--x.y", "-1", "--quiet", "false", "c", "--last"]
    pairs = ["--fresh", "--x.y=-1", "--quiet=false", "--last"]
    assert split_arguments(arguments, flags={"fresh", "quiet"}) == (["a.yaml", "b", "c"], pairs)
    assert split_arguments(["--fresh", "b"]) == ([], ["--fresh=b"])


def test_a_list_takes_the_words_that_a_shell_makes_of_a_pattern():
    def split(*arguments: str) -> tuple[list[str], list[str]]:
        return split_arguments(arguments, flags={"fresh"}, lists={"files"}, max_words=1)

    pairs = ['--files=["x.txt", "y, \u00e9.txt"]', "--fresh"]
    assert split("a", "--files", "x.txt", "y, \u00e9.txt", "--fresh") == (["a"], pairs)
    assert split("a", "--files", "[x, y]") == (["a"], ["--files=[x, y]"])
    assert split("--files", "x.txt", "a") == (["a"], ["--files=x.txt"]), "a word that is still missing comes first"
    assert split("a", "--files=x.txt", "b") == (["a", "b"], ["--files=x.txt"])
