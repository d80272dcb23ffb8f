"""Injection: which modules a rule takes, and what a rule that cannot work says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from model.modules.inject import inject
from model.modules.linear import Linear
from model.modules.moe import FusedMoE
from model.modules.registry import (
    OPERATORS,
    ModuleContext,
    Operator,
    find_operator,
    is_class,
    operator,
)
from model.rules import default_rules, parse_rules
from pykernels.errors import PykernelsError

from .. import tiny


def meta(model_type: str = "deepseek_v3", **config: Any) -> PreTrainedModel:
    settings = {**tiny._BASE, **tiny._FAMILY.get(model_type, {}), **config}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings))


def rule(
    replace: str = "FusedMoE",
    *,
    cls: str | None = None,
    name: str | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> Any:
    return {
        "match": {"class": cls, "name": name},
        "replace": {"class": replace, "device": device, "kwargs": kwargs},
    }


def apply(model: PreTrainedModel, *rules: Any, kernel: str = "auto") -> list[str]:
    return [r.name for r in inject(model, parse_rules(list(rules), "test.yaml"), kernel)]


@pytest.fixture
def registered() -> Any:
    """Operators registered by a test are forgotten after it."""
    before = copy.copy(OPERATORS)
    yield
    OPERATORS.clear()
    OPERATORS.update(before)


@pytest.mark.parametrize("model_type", tiny.ARCHITECTURES)
def test_shipped_rules_replace_every_moe_block_and_nothing_else(model_type: str) -> None:
    model = meta(model_type)
    before = {n: type(m) for n, m in model.named_modules()}
    done = inject(model, default_rules(model_type))
    moe_layers = [n for n in before if n.endswith(".experts")]
    assert [r.operator.stored_name for r in done] == moe_layers
    assert moe_layers
    for name, module in model.named_modules():
        if not isinstance(module, FusedMoE):
            assert type(module) is before[name], name
    left = [n for n, _ in model.named_parameters() if ".experts." in n]
    assert not left


@pytest.mark.parametrize(
    ("path", "names_it"),
    [
        ("Linear", True),
        ("linear.Linear", True),
        ("torch.nn.Linear", True),
        ("near", False),
        ("ear.Linear", False),
        ("other.Linear", False),
        ("torch.nn.Bilinear", False),
    ],
)
def test_class_names(path: str, names_it: bool) -> None:
    assert is_class(nn.Linear, path) == names_it


def test_name_and_class_must_both_hold() -> None:
    found = apply(meta(), rule(cls="DeepseekV3MoE", name=r"\.2\."))
    assert found == ["model.layers.2.mlp"]


def test_the_first_rule_that_matches_wins() -> None:
    model = meta()
    first = rule(name=r"layers\.1\.mlp$", kernel="generic")
    apply(model, first, rule(cls="DeepseekV3MoE"), kernel="avx512")
    kernels = [m.kernel for m in model.modules() if isinstance(m, FusedMoE)]
    assert kernels == ["generic", "avx512"]


@pytest.fixture
def keeper(registered: None) -> None:
    """An operator, `Keeper`, that has the module which it replaces as a child."""

    @operator
    class Keeper(Operator):
        def __init__(self, original: nn.Module, context: ModuleContext) -> None:
            super().__init__(original, context)
            self.context, self.original = context, original


def test_traversal_goes_on_in_the_new_module(keeper: None) -> None:
    model = meta()
    found = apply(
        model,
        rule("Keeper", name=r"layers\.1\.mlp$"),
        rule("Keeper", name=r"layers\.1\.mlp\.original\.gate$", device="cuda:0"),
    )
    assert found == ["model.layers.1.mlp", "model.layers.1.mlp.original.gate"]
    assert model.get_submodule(found[1]).context.device == "cuda:0"


def test_what_an_operator_keeps_is_not_replaced_again(keeper: None) -> None:
    found = apply(meta(), rule("Keeper", cls="torch.nn.Linear"))
    assert len(found) == len(set(found)) == sum(type(m) is nn.Linear for m in meta().modules())


def test_an_ambiguous_operator_needs_its_full_path(registered: None) -> None:
    for module in ("here", "there"):
        operator(type("Twin", (Operator,), {"__module__": module}))
    with pytest.raises(PykernelsError, match="'Twin' names several operators. Write its full path"):
        apply(meta(), rule("Twin", name="gate$"))
    assert find_operator("there.Twin", "test.yaml").__module__ == "there"


def test_linears_of_a_replaced_block_are_replaced_not_the_head() -> None:
    """Listing 1's first and third rule: recursion into new modules, the head left out by name."""
    model = meta()
    found = apply(
        model,
        rule(cls="DeepseekV3MoE"),
        rule("Linear", cls="torch.nn.Linear", name=r"^(?!lm_head$).*$", format="int4"),
    )
    assert "model.layers.1.mlp.shared_experts.up_proj" in found and "lm_head" not in found
    left = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    assert left == ["lm_head"]
    assert {m.format for m in model.modules() if isinstance(m, Linear)} == {"int4"}


MOE = "DeepseekV3MoE"
# fmt: off
WRONG = [
    ([rule("NoSuch", name="mlp")], "test.yaml, rule 1: there is no operator 'NoSuch'. .*FusedMoE"),
    ([rule(cls="DeepseekV3Moe")], "matches no module. Did you mean DeepseekV3M"),
    ([rule(name=r"^model\.layer\.")], "matches no module. Modules are called like model, "),
    ([rule(cls=MOE, name="lm_head")], "matches no module. The class is at model.layers.1.mlp, mod"),
    ([rule(cls=MOE), rule(name=r"layers\.1\.mlp$")], "rule 2 .* is never reached: earlier rules"),
    ([rule(cls=MOE, kernal="auto")], "unexpected .* 'kernal'. Did you mean kernel.? Its kwargs"),
    ([rule(cls=MOE, device="cuda:0")], "cannot run on 'cuda:0'"),
    ([rule(cls=MOE, format="int3")], "no expert format 'int3'"),
    ([rule("FuseMoE", cls=MOE)], "no operator 'FuseMoE'. Did you mean model.modules.moe.FusedMoE"),
    ([rule("Linear", name=r"layers.1.mlp$")], "is a DeepseekV3MoE, no torch.nn.Linear"),
    ([rule("Linear", cls="Linear", format="int3")], "no format 'int3'. Use auto, bf16"),
    ([rule("Linear", name="q_a_proj$", format="q4_k")], "q4_k takes inputs in multiples of 256"),
    ([rule(cls="DeepseekV3MLP")], "is no MoE block with a gate and experts"),
]
# fmt: on


@pytest.mark.parametrize(("rules", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_rule_that_cannot_work_says_why(rules: list[Any], message: str) -> None:
    with pytest.raises(PykernelsError, match=message) as raised:
        apply(meta(), *rules)
    assert "\n" not in str(raised.value)


SPOILT = [
    (lambda block: setattr(block, "shared_expert_gate", None), "shared_expert without its gate"),
    (lambda block: delattr(block.experts, "down_proj"), "experts of a layout that is not known"),
    (lambda block: setattr(block.experts, "norm", nn.Parameter(torch.ones(1))), "not known"),
    (lambda block: block.register_module("extra", nn.Identity()), "are not known: extra"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_unknown_blocks_are_refused(spoil: Any, message: str) -> None:
    model = meta("qwen2_moe")
    spoil(model.get_submodule("model.layers.0.mlp"))
    with pytest.raises(PykernelsError, match=rf"layers.0.mlp\S* .*{message}"):
        apply(model, rule(name=r"layers\.0\.mlp$"))
