"""Groups of parameters as `plan` and `inspect` show them, by the optimizer, `optimizer.groups` and the model's size."""

import io

from gregale.model.parametrisation import CompletePConfig
from gregale.optim import AdamWConfig, GroupConfig, MuonConfig
from gregale.programs.plan.text import _parameter_groups
from gregale.programs.runtime.setup import parameter_groups, rules_of
from gregale.terminal import Console
from tests.cost.steps import small_setup


def test_muons_part_of_adamw_is_a_group_beside_others():
    group = GroupConfig("layer.1.mlp.up.*|head", learning_rate=0.5)
    muon = MuonConfig(0.02, weight_decay=0.1, adamw_learning_rate=0.004, groups=(group,), adamw="*gate*")
    setup = small_setup((1, 1, 1), model={"parametrisation": CompletePConfig(8)}, others={"optimizer": muon})
    matrices = ["mlp.down.weight", *(f"attention.{name}.weight" for name in ("query", "key", "value", "out"))]
    found = {tuple(each.values())[:3]: each["parameters"] for each in parameter_groups(setup)}
    assert {rule: sorted(names) for rule, names in found.items()} == {  # hidden is 4 times that of the base
        ("adamw", 0.004, 0.1): ["embedding"],
        ("adamw", 0.004 / 4, 0.1 * 4): ["layer.*.mlp.gate.weight"],
        ("adamw", 0.004 / 4 / 2, 0.1 * 4): ["head"],
        ("adamw", 0.004, 0.0): ["layer.*.attention_norm.weight", "layer.*.mlp_norm.weight", "norm.weight"],
        ("muon", 0.01, 0.2): sorted(
            [*(f"layer.*.{name}" for name in matrices), *(f"layer.{i}.mlp.up.weight" for i in (0, 2))]
        ),
        ("muon", 0.005, 0.2): ["layer.1.mlp.up.weight"],
    }
    assert rules_of(setup)["layer.1.mlp.up.weight"].rate == 0.005
    out = io.StringIO()
    _parameter_groups(parameter_groups(setup), Console(file=out))
    assert "layer.1.mlp.up.weight" in out.getvalue()


def test_one_rate_for_all_is_not_shown():
    assert parameter_groups(small_setup((1, 1, 1), others={"optimizer": AdamWConfig()})) == []
