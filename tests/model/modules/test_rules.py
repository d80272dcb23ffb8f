"""The YAML of the injection rules: what is understood, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.modules.registry import OPERATORS
from model.rules import default_rules, known_architectures, known_sets, load_rules, resolve_rules
from pykernels.errors import PykernelsError

from ..tiny import ARCHITECTURES


def written(folder: Path, text: str) -> Path:
    file = folder / "rules.yaml"
    file.write_text(text)
    return file


def test_sets_go_before_the_architectures_own() -> None:
    own = default_rules("qwen2_moe")
    rules = resolve_rules("int4,gpu", "qwen2_moe")
    assert rules[-len(own) :] == own
    assert [rule.replace.cls for rule in rules[:2]] == ["model.modules.linear.Linear", None]
    for name in known_sets():
        assert len(resolve_rules(name, "llama")) >= 1
    with pytest.raises(PykernelsError, match="nor a shipped set. Give a YAML file, or some of 2-g"):
        resolve_rules("int4,gpus", "llama")


def test_every_known_architecture_has_rules_that_parse() -> None:
    assert set(known_architectures()) == {*ARCHITECTURES, "lfm2", "llama"}
    assert default_rules("llama") == []  # dense
    for architecture in ARCHITECTURES:
        (rule,) = default_rules(architecture)
        assert rule.replace.cls in OPERATORS


RULE = "- match: {class: A}\n  replace: {class: B}\n"
MISTAKES = [
    (
        RULE + "- match:\n    klass: A\n  replace: {class: B}",
        "rules.yaml:4: unknown key 'klass' in match. Did you mean class?",
    ),
    (
        "- mach: {class: A}\n  replace: {class: B}",
        "rules.yaml:1: unknown key 'mach'. Did you mean match?",
    ),
    (
        RULE + "- match: {class: A}\n  replace:\n    class: B\n    device: cuda0",
        "rules.yaml:6: replace.device: 'cuda0' is no device",
    ),
    (RULE + "- match: {class: A}", "rules.yaml:3: replace is missing. Add it."),
    ("- match: {}\n  replace: {class: B}", "rules.yaml:1: match: match needs a class, a name or"),
    ("- match: {name: '('}\n  replace: {class: B}", "rules.yaml:1: match.name: '(' is no regular"),
    (RULE + "  match: {name: b}", "rules.yaml:3: match stands twice, in line 1 too"),
    (RULE + "- just text", "rules.yaml:3: 'just text' is no rule"),
    ("- match: {class: A}\n  replace: {kwargs: {a: 1}}", "replace: replace needs a class, a dev"),
    ("- match: {class: A}\n  replace: {class: B, device: [cpu]}", "a list of devices is for"),
    ("match: {class: A}", "is no list of rules"),
    ("", "is no list of rules"),
    (RULE + "- match: {class: A", "rules.yaml:3: this is not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_names_the_file_and_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PykernelsError) as raised:
        load_rules(written(tmp_path, text))
    assert message in str(raised.value)
    assert "rules.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PykernelsError, match="absent.yaml cannot be read"):
        load_rules(tmp_path / "absent.yaml")


def test_other_architectures_have_a_rule_by_what_modules_hold() -> None:
    (rule,) = default_rules("phimoe")
    assert (rule.match.holds, rule.match.cls) == ("experts", None)
