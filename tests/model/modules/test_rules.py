"""The YAML of the injection rules: what is understood, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.modules.registry import OPERATORS
from model.rules import default_rules, known_architectures, load_rules
from pykernels.errors import PykernelsError

from ..tiny import ARCHITECTURES


def written(folder: Path, text: str) -> Path:
    file = folder / "rules.yaml"
    file.write_text(text)
    return file


def test_the_papers_listing_is_understood(tmp_path: Path) -> None:
    text = r"""
- match:
    class: modeling_deepseek_v3.DeepseekV3MoE
  replace:
    class: operators.experts.FusedMoE
    device: "cpu"
    kwargs:
      backend: "hybrid_AMX_AVX512"
      n_deferred_experts: 6
- match: {name: "^(?!lm_head$).*$", class: torch.nn.Linear}
  replace: {class: operators.linear.MarlinLinear, device: "cuda:0"}
"""
    first, second = load_rules(written(tmp_path, text))
    assert first.match.cls == "modeling_deepseek_v3.DeepseekV3MoE"
    assert first.match.name is None
    assert first.replace.kwargs == {"backend": "hybrid_AMX_AVX512", "n_deferred_experts": 6}
    assert (second.match.name, second.replace.device) == ("^(?!lm_head$).*$", "cuda:0")
    assert second.origin.endswith("rules.yaml, rule 2")


def test_every_known_architecture_has_rules_that_parse() -> None:
    assert set(known_architectures()) == {*ARCHITECTURES, "llama"}
    assert default_rules("llama") == []  # dense
    for architecture in ARCHITECTURES:
        (rule,) = default_rules(architecture)
        assert rule.replace.cls in OPERATORS


RULE = "- match: {class: A}\n  replace: {class: B}\n"
MISTAKES = [
    (RULE + "- match: {klass: A}\n  replace: {class: B}", "rule 2: unknown key 'match.klass'"),
    ("- match: {class: A}", "rule 1: replace: Field required"),
    ("- match: {}\n  replace: {class: B}", "rule 1: match: match needs a class, a name or both"),
    ("- match: {name: '('}\n  replace: {class: B}", "rule 1: match.name: '(' is no regular"),
    ("- just text", "rule 1 is no mapping"),
    ("match: {class: A}", "is no list of rules"),
    ("- match: {class: A", "is not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_names_the_file_and_the_rule(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PykernelsError) as raised:
        load_rules(written(tmp_path, text))
    assert message in str(raised.value)
    assert "rules.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PykernelsError, match="absent.yaml cannot be read"):
        load_rules(tmp_path / "absent.yaml")


def test_every_other_architecture_has_a_rule_by_what_modules_hold() -> None:
    (rule,) = default_rules("phimoe")
    assert (rule.match.holds, rule.match.cls) == ("experts", None)
