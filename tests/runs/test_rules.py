"""Each rule between settings refuses a small configuration; `docs/reference/what_does_not_go_together.md` has them."""

import re
import shlex

import jax
import pytest

from gregale.axes.layout import make_mesh, mapped_layout
from gregale.errors import Mistakes
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.runs.rules import check
from gregale.settings import LAYOUT, TRAINING, Rule
from tests.docs.pages import page_tables
from tests.plugins import EXAMPLES, plugins_from

BASE = {
    "name": "rules",
    "steps": 10,
    "mesh": {"replica": 1, "data": 1},
    "batch": {"size": 8, "sequence_length": 18},
    "data": {"sources": {"words": {"type": "text", "files": ["none"]}}},
}
TUNED, NOTHING = "--start_from x --adapter.rank 2", "--data.held_out 0"
EXPERTS = f"{TUNED} --model.experts '{{count: 4, active: 2, width: 16}}' --adapter.targets '[query, expert_gate]'"
QK_CLIP = "--optimizer.type muon --optimizer.qk_clip 100"
MIXER = "--plugins '[causal_mixer]' --model.type causal_mixer"
DPO = (
    "--start_from x --objective.type dpo --data.sources.words '{type: chat, form: pairs, packing: pad, files: [none]}'"
)
PIPELINE = "--pipeline.repeats 1 --model.layers 4"
STAGES, MIXTURES = f"{PIPELINE} --mesh.stage 2", "--data.replica_mixtures '[{words: 1}, {words: 1}]'"
REFUSED = [  # in the order of the rules: arguments, and what the message has beside the text of the rule
    ("--adapter.rank 2", "adapter is set and start_from is null: "),
    (f"{EXPERTS} --model.experts.balance '{{bias: true, bias_rate: 0.1}}'", "bias_rate is 0.1"),
    (f"{EXPERTS} --adapter.dropout 0.1", "[query, expert_gate] (on the command line) and adapter.dropout is 0.1: "),
    (f"{EXPERTS} --compute.matmul int8", "compute.matmul is int8"),
    (f"{TUNED} --adapter.base nf4 --compute.gather per_step", "all layers in bfloat16. "),
    (f"{TUNED} --adapter.base int8 --compute.remat none", "compute.remat is none and pipeline is null"),
    (f"{TUNED} --model.parametrisation.type complete_p", "adapter is set and model.parametrisation is set"),
    ("--model.parametrisation.type complete_p --optimizer.type sgd", "optimizer.type is sgd"),
    (f"{QK_CLIP} --model.qk_norm true", "model.qk_norm is true"),
    (f"{QK_CLIP} --model.type gemma --model.score_softcap 50", "model.score_softcap is 50"),
    (f"{QK_CLIP} {PIPELINE}", "pipeline is set"),
    (f"{QK_CLIP} {TUNED}", "adapter is set"),
    (f"{QK_CLIP} {DPO}", "objective.type is dpo: optimizer.qk_clip is for"),
    ("--average.evaluate --sync.type diloco --mesh.replica 8 --sync.evaluate average", "sync.evaluate is average"),
    (f"{DPO} --start_from null", "objective.type is dpo"),
    (f"{DPO} --data.sources.words.form prompt", "data.sources.words is set"),
    (f"{DPO} --objective.type next_token", "data.sources.words is set"),
    (f"{DPO} {PIPELINE}", "pipeline is set and objective.type is dpo: pipeline is for the loss"),
    (f"{DPO} --evaluation.by_position", "objective.type is dpo: evaluation.by_position is for the loss"),
    (f"{DPO} --evaluation.bigram", "objective.type is dpo: evaluation.bigram is for the loss"),
    (f"{NOTHING} --evaluation.every 5", "evaluation.every is 5 (on the command line) and data.held_out is 0"),
    (f"{NOTHING} --evaluation.bigram", "evaluation.bigram is true"),
    (f"{NOTHING} --reduce.measure --reduce.codec int8", "or leave reduce.measure out"),
    (f"{MIXTURES} --stages '[{{from: 5, data: {{replica_mixtures: [{{words: 1}}]}}}}]'", "data.replica_mixtures is ["),
    (
        "--export.every 1 --runs s3://bucket/runs",
        "export.every is 1 (on the command line) and runs is s3://bucket/runs",
    ),
    (f"{PIPELINE} --compute.gather per_step", "compute.gather is per_step"),
    (f"{PIPELINE} --mapping.params.embed null", "mapping.params.embed is null"),
    (f"{PIPELINE} --mapping.compute.experts data", "mapping.compute.experts is [data]"),
    ("--mesh.replica 4 --mesh.stage 2", "mesh.stage is 2 and pipeline is null"),
    (f"{STAGES} --mesh.context 2 --mesh.replica 2 --batch.sequence_length 16", "mesh.context is 2 and pipeline is set"),
    (f"{MIXER} --mesh.context 2 --mesh.replica 4 --batch.sequence_length 16", "model.type is causal_mixer"),
    (
        "--mesh.context 2 --mesh.replica 4",
        "2 x 2 = 4 chunks, and 18 / 4 = 4.5 ... batch.sequence_length 16 or 20 would",
    ),
    (
        "--mesh.context 4 --mesh.replica 2 --batch.sequence_length 32 --evaluation.sequence_lengths '[64, 12]'",
        "2 x 4 = 8 chunks, and 12 / 8 = 1.5 ... evaluation.sequence_lengths 8 or 16 would",
    ),
    (
        f"{DPO} --mesh.replica 8",
        "batch.size is 8 ... each of 1 microbatches has 1 rows ... is 2 rows. batch.size 16 would",
    ),
    (
        f"{STAGES} --mesh.replica 4 --pipeline.microbatches 4",
        "has 1 rows on a device, ... 4 / mesh.stage 2 = 2 ... 16 would",
    ),
    (
        "--reduce.codec int8 --mesh.replica 4 --mesh.data 2 --mapping.opt_state.mlp '[model, data]'",
        "mlp is [model, data] ... data in params too",
    ),
    (f"{MIXTURES} --mesh.replica 8", "sync.type is psdp"),
    (
        f"{MIXTURES} --sync.type diloco --mesh.replica 8",
        "8 replicas train separately, with 2 mixtures. ... set mesh.replica to 2",
    ),
    ("--checkpoint.every 15m --islands.lockstep", "checkpoint.every is 15m"),
    ("--average.decay 0.9 --islands.lighthouse a:1 --islands.token_file t --sync.type diloco", "average is set"),
    ("--mesh.island 2 --mesh.replica 4", "mesh.island is 2 and sync.type is psdp"),
    ("--mesh.replica 8 --reduce.codec topk", "sync.type is psdp and reduce.codec is topk"),
    ("--mesh.replica 8 --reduce.codec int4 --reduce.phases 1", "sync.type is psdp and reduce.phases is 1"),
    ("--plugins '[gossip]' --sync.type gossip --reduce.codec int8", "sync.type is gossip"),
    ("--plugins '[gossip]' --sync.type gossip --mesh.replica 8 --average.every 2", "sync.type is gossip"),
    ("--sync.type diloco --mesh.replica 8 --reduce.codec topk --sync.outer.momentum 0.9", "and reduce.codec is topk"),
    ("--sync.type diloco --mesh.replica 8 --reduce.codec topk --sync.outer.type adamw", "sync.outer.type is adamw"),
]
RULES: list[Rule] = page_tables().every_rule()


def test_every_rule_has_an_example():
    assert len(REFUSED) == len(RULES)


def check_all(arguments: str) -> None:
    config = load(TrainConfig, BASE, shlex.split(arguments))
    layout = mapped_layout(make_mesh(config.mesh, jax.devices()), config.mapping)
    check(config, layout, LAYOUT)
    check(config, layout, TRAINING)


@pytest.mark.parametrize(("rule", "refused"), zip(RULES, REFUSED, strict=False), ids=lambda each: str(each[0]))
def test_a_rule_refuses_what_breaks_it(rule, refused):
    arguments, words = refused
    with plugins_from(EXAMPLES), pytest.raises(Mistakes) as caught:
        check_all(arguments)
    message = str(caught.value)
    text = re.escape(rule.text.replace("{{", "\0").replace("}}", "\1"))
    text = re.sub(r"\\{[\w\\.]+\\}", ".+", text).replace("\0", "{").replace("\1", "}")
    assert re.search(f": {text}", message), message
    for part in words.split(" ... "):
        assert part in message
