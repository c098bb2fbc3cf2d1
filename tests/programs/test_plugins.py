"""A run with a model, an optimizer and a method of one's own is resumed, evaluated, sampled, planned and refused."""

import csv
import json
import re
import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import pytest
import yaml
from haliax import Axis

from gregale.cli import main
from gregale.errors import UserError
from gregale.huggingface.config import exported_family
from gregale.model.config import ModelConfig
from gregale.model.llama import Block, Llama, LlamaConfig
from tests.docs.pages import ROOT, blocks
from tests.plugins import EXAMPLES, plugins_from
from tests.programs.tiny import CONFIG, assert_same_state, killed, lines, write_inputs

PAGES = ROOT / "docs" / "extending"
OWN = {
    "plugins": ["causal_mixer", "adan", "gossip", "weight_norms"],
    "callbacks": [{"type": "weight_norms", "every": 3}],
    "model": {"type": "causal_mixer", "hidden": 32},
    "optimizer": {"type": "adan", "learning_rate": 0.01, "schedule": {"type": "constant"}},
    "sync": {"type": "gossip"},
    "batch": {"size": 8, "sequence_length": 32},
    "checkpoint": {"every": 2},
    "evaluation": {"every": 2},
    "samples": {"prompts": ["the wind"], "tokens": 4},
    "inspect": {"every": 3},
    "data": {"sources": {"notes": {"type": "csv", "files": ["notes.csv"], "column": "note"}}, "held_out": 0.2},
    "steps": 4,
}
BARE = """
from dataclasses import dataclass
import equinox as eqx
from causal_mixer import Mixer, MixerConfig
from gregale.model.config import ModelConfig

class Bare(eqx.Module):
    mixer: Mixer
    def loss(self, batch, execution):
        return self.mixer.loss(batch, execution)

@ModelConfig.register_subclass("bare")
@dataclass(frozen=True)
class BareConfig(MixerConfig):
    def init(self, Vocab, key):
        return Bare(super().init(Vocab, key))
"""
TASK = '{"context": "a", "choices": [" b", " c"], "answer": 0}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with text, `own.yaml` and the run of this configuration, of 4 steps."""
    folder = write_inputs(tmp_path_factory.mktemp("own"))
    (folder / "own.yaml").write_text(yaml.safe_dump({**CONFIG, "name": "own", **OWN}))
    (folder / "task.jsonl").write_text(TASK)
    with (folder / "notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["note"], *([path.read_text()] for path in (folder / "text").iterdir())])
    (folder / "bare.py").write_text(BARE)
    with plugins_from(EXAMPLES), plugins_from(folder), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "own.yaml"]) == 0
        yield folder


@pytest.fixture
def gregale(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda *arguments: main(list(arguments))


def logged(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines(folder / "runs" / "own") if name in line]


def test_it_learns_and_is_inspected(folder):
    losses = logged(folder, "loss")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    assert len(logged(folder, "parameter_norm/layer.1")) == 1
    assert len(logged(folder, "weight_norm_max")) == 4
    assert len(logged(folder, "weight_norm_median")) == 1
    assert (folder / "runs" / "own" / "largest_weights.txt").read_text().startswith("step 3: .")
    assert "--- step 4\nthe wind" in (folder / "runs" / "own" / "samples.txt").read_text()


def test_the_evaluation_is_that_of_the_run_and_tasks_are_scored(folder, evaluated):
    found = evaluated("own", "--data", "text/0.txt", "--tasks", "task.jsonl")
    assert evaluated("own")["eval_loss"] == pytest.approx(logged(folder, "eval_loss")[-1], rel=1e-5)
    assert 0 <= found["acc.task"] <= 1
    assert found["eval_loss"] > 0


def test_it_has_the_whole_plan(printed, folder, monkeypatch):
    """FLOPs of the plugin's products, roofline, methods, and a search."""
    report = json.loads(printed("plan", "runs/own/config.yaml", "--json"))
    sent = report["bytes_per_step"]["axes"]["replica"]
    assert logged(folder, "replica_bytes")[:2] == [sent, 2 * sent], "the method says what the compiled program sends"
    assert report["memory"]["peak"] > report["memory"]["parameters"] == sent
    assert report["flops_per_token"] == report["flops_per_token_full_attention"] > 2 * report["parameters"]
    assert report["roofline"]["step_seconds_overlapped"] > 0
    assert report["methods"].keys() >= {"psdp", "diloco"}
    assert any("sync.type is gossip, whose method does not tell its traffic" in note for note in report["notes"])
    monkeypatch.setattr("gregale.programs.plan.search.MAX_COMPILED", 1)
    assert "candidates, 1 of them compiled" in printed("plan", "own.yaml", "--search")


def test_the_plan_has_each_program_of_the_first_steps_of_a_method(printed):
    report = json.loads(printed("plan", "own.yaml", "--sync.period", "2", "--json"))
    over = {name: each["bytes_per_step"]["axes"].get("replica") for name, each in report["programs"].items()}
    assert over == {"step": None, "step_2": report["memory"]["parameters"]}
    assert report["notes"][0].endswith("of its first steps have it: step in 50.0% of them, step_2 in 50.0% of them.")


LAMB = """
from dataclasses import dataclass
import optax
from gregale.optim import OptimizerConfig

@OptimizerConfig.register_subclass("lamb")
@dataclass(frozen=True)
class LambConfig(OptimizerConfig):
    def direction(self):
        return optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio())
"""


def test_an_optimizer_that_reduces_over_shards_is_named_with_its_bytes(printed, folder):
    (folder / "lamb.py").write_text(LAMB)
    given = ["--plugins", "causal_mixer,lamb,gossip,weight_norms", "--mesh.model=1", "--mesh.data=4", "--steps=1"]

    def planned(optimizer: str, method: str) -> tuple[int, list[str]]:
        """The payload of a step over data and replica together, and the notes about the optimizer."""
        options = ["--optimizer", f"{{type: {optimizer}}}", "--sync.type", method, "--json"]
        report = json.loads(printed("plan", "own.yaml", *given, *options))
        notes = [each for each in report["notes"] if each.startswith("optimizer.type")]
        return report["bytes_per_step"]["axes"].get("replica,data", 0), notes

    plain, none = planned("adamw", "psdp")
    payload, (note,) = planned("lamb", "psdp")
    assert none == planned("lamb", "gossip")[1] == [], "the shards of a replica that trains apart are inside it"
    sent = (payload - plain) * 2 * 7 // 8  # a ring of eight
    assert sent > 0
    assert f"optimizer.type is lamb, whose update reduces over shards: a device sends {sent:,} bytes a step" in note
    options = ["--optimizer", "{type: lamb}", "--sync.type", "psdp", "--name", "lamb", "--samples.prompts", "[]"]
    assert note in " ".join(printed("train", "own.yaml", *given, *options).split())


def test_its_export_is_refused_and_its_report_is_written(folder, gregale, refused):
    assert "model.type is causal_mixer, a model of your own" in refused("export", "own", "out")
    assert not (folder / "out").exists()
    assert gregale("report", "own", "--output", "own.html") == 0
    assert "causal_mixer" in (page := (folder / "own.html").read_text())
    assert "weight_norm_max" in page


def test_a_subclass_of_llama_with_another_loss_is_exported_once_it_says_so(folder, gregale, refused):
    (folder / "my_loss.py").write_text(blocks((PAGES / "loss.md").read_text(), "python")[0])
    given = ["--plugins", "my_loss,adan", "--model", "{type: unsure_llama, layers: 1, hidden: 32, mlp: 64, heads: 2}"]
    given += ["--sync.type", "psdp", "--steps", "1", "--samples.prompts", "[]", "--callbacks", "[]"]
    assert gregale("train", "own.yaml", "--name", "z", *given) == 0
    assert gregale("export", "z", "z-out") == 0
    page = (folder / "my_loss.py").read_text()
    (folder / "my_loss.py").write_text(page.replace("    exports_as_llama = True\n", ""))
    del sys.modules["my_loss"], ModelConfig.get_known_choices()["unsure_llama"]
    assert "the model has a UnsureLlama, a class of your own" in refused("export", "z", "again")
    assert not (folder / "again").exists()


def test_a_subclass_or_a_part_of_ones_own_does_not_inherit_the_right_to_be_exported():
    class Loss(Llama):
        exports_as_llama = True

    class Hidden(Loss):
        pass

    class Part(Block):
        pass

    config, Vocab = LlamaConfig(layers=1), Axis("vocab", 64)
    made = {
        kind: jax.eval_shape(partial(kind.init, config, Vocab), jax.random.key(0)) for kind in (Llama, Loss, Hidden)
    }
    for kind in (Llama, Loss):
        assert exported_family(made[kind], config, Vocab, {}).model_type == "llama"
    part = eqx.tree_at(lambda model: model.blocks, made[Llama], Part(**vars(made[Llama].blocks)))
    for wrong, name in ((made[Hidden], "Hidden"), (part, "Part")):
        with pytest.raises(UserError, match=f"the model has a {name}, a class of your own"):
            exported_family(wrong, config, Vocab, {})


def test_a_resumed_run_equals_an_undisturbed_one(folder, gregale):
    again = killed(folder / "runs" / "own", folder / "runs" / "again", 2)
    assert gregale("train", "own.yaml", "--name", "again") == 0
    assert_same_state(again, folder / "runs" / "own", 4)


def test_a_model_with_a_loss_alone_trains_and_is_evaluated_but_not_sampled(gregale, refused):
    given = ["--name", "bare", "--plugins", "bare,adan", "--model.type", "bare", "--sync.type", "psdp", "--steps", "2"]
    unsampled = "model.type bare cannot be sampled: its model has neither `logits` nor"
    assert unsampled in refused("train", "own.yaml", *given)
    assert gregale("train", "own.yaml", *given, "--samples.prompts", "[]") == 0
    assert unsampled in refused("sample", "bare", "the")
    assert gregale("eval", "bare") == 0
    assert "model.type bare cannot score tasks or sliding windows" in refused("eval", "bare", "--tasks", "task.jsonl")


def test_the_schedule_tokenizer_codec_and_tracker_of_the_pages_train(folder, gregale):
    names = ("schedule", "tokenizer", "codec", "tracker")
    for name in names:
        (folder / f"my_{name}.py").write_text(blocks((PAGES / f"{name}.md").read_text(), "python")[0])
    given = {
        "plugins": ",".join(["causal_mixer", *(f"my_{name}" for name in names)]),
        "optimizer": "{type: adamw, schedule: {type: inverse_root, scale: 1}}",
        "data.tokenizer": "{type: indent}",
        "data.workers": "2",
        "reduce.codec": "float16",
        "trackers": "[{type: csv}]",
        "name": "pages",
        "sync.type": "psdp",
        "steps": "3",
        "samples.prompts": "[]",
    }
    assert gregale("train", "own.yaml", *(f"--{key}={value}" for key, value in given.items())) == 0
    run = folder / "runs" / "pages"
    rates = [line["learning_rate"] for line in lines(run) if "learning_rate" in line]
    assert rates == pytest.approx([1e-3, 1e-3 / 2**0.5, 1e-3 / 3**0.5])
    rows = [[str(line["step"]), str(line["loss"])] for line in lines(run) if "loss" in line]
    assert list(csv.reader((run / "losses.csv").open())) == rows
    assert gregale("eval", "pages") == 0


RAISING = {
    "schedule": ("def after_warmup", ["--optimizer", "{type: adamw, schedule: {type: raising}}"]),
    "source": ("def scan", ["--data.sources", "{p: {type: raising, files: [text/0.txt]}}"]),
    "tokenizer": ("def encode", ["--data.tokenizer", "{type: raising}"]),
    "codec": ("def encode", ["--reduce.codec", "raising"]),
    "optimizer": ("def direction", ["--optimizer", "{type: raising}"]),
    "method": ("def mix", ["--sync.type", "raising"]),
}


@pytest.mark.parametrize("kind", RAISING)
def test_code_of_any_kind_that_raises_ends_the_command_with_its_file_and_line(folder, refusal, kind):
    method, given = RAISING[kind]
    sources = {"optimizer": EXAMPLES / "adan.py", "method": EXAMPLES / "gossip.py"}
    code = sources[kind].read_text() if kind in sources else blocks((PAGES / f"{kind}.md").read_text(), "python")[0]
    code = re.sub(r'(register_subclass|register_codec)\("\w+"', r'\1("raising"', code).replace(
        '"type": "indent"', '"type": "raising"'
    )
    code = re.sub(r"\n(schedule|tokenizer|codec) = [\s\S]*", "\n", code)  # what a page does with it
    before, line, after = re.split(rf"( +{method}\(.*\n)", code, maxsplit=1)
    indented = " " * (len(line) - len(line.lstrip()) + 4)
    own = folder / f"raising_{kind}.py"
    own.write_text(f'{before}{line}{indented}raise ZeroDivisionError("no luck")\n{after}')
    base = ["--optimizer", "{type: adamw}", "--callbacks", "[]", "--sync.type", "psdp", "--samples.prompts", "[]"]
    with plugins_from(folder):
        error = refusal("train", "own.yaml", "--name", kind, "--plugins", f"causal_mixer,{own.stem}", *base, *given)
    assert f"ZeroDivisionError ({own}, line {(before + line).count(chr(10)) + 1}): no luck." in error


WRONG = """
from dataclasses import dataclass
import haliax as hax
from causal_mixer import Mixer, MixerConfig
from gregale.model.config import ModelConfig
from gregale.settings import setting

class Wrong(Mixer):
    def loss(self, batch, execution):
        if HOW == "raises":
            raise ZeroDivisionError("no loss")
        losses, weights = super().loss(batch, execution)
        return losses

@ModelConfig.register_subclass("wrong")
@dataclass(frozen=True)
class WrongConfig(MixerConfig):
    def split_axes(self):
        return {}
    def init(self, Vocab, key):
        made = super().init(Vocab, key)
        return None if HOW == "none" else Wrong(made.embedding, made.layers, made.norm)
"""
MISTAKES = {
    "raises": "model.type wrong: Wrong.loss raised ZeroDivisionError (",
    "one value": "model.type wrong: Wrong.loss has to return two scalar arrays, the sum of losses and the",
    "none": "model.type wrong: WrongConfig.init returns a model without `loss`.",
    "odd": "the axis embed of model is 33: parameters of the model would be split over data 2 x replica 2",
}


@pytest.mark.parametrize("how", MISTAKES)
def test_a_mistake_of_a_model_is_one_line(folder, refusal, how):
    (folder / "wrong.py").write_text(WRONG.replace("HOW", repr(how)))
    given = ["--name", "wrong", "--plugins", "causal_mixer,wrong", "--model.type", "wrong", "--sync.type", "psdp"]
    given += ["--optimizer", "{type: adamw}", "--callbacks", "[]", "--fresh", "--seed", str(len(how))]
    with plugins_from(folder):
        error = refusal("train", "own.yaml", *given, *(["--model.hidden", "33"] if how == "odd" else []))
    assert MISTAKES[how] in error
    assert ("wrong.py, line 11" in error) == (how == "raises")
