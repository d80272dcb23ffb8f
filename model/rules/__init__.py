"""Injection rules in YAML: which modules to replace, by which operator, and what runs where.

    - match:
        class: modeling_deepseek_v3.DeepseekV3MoE   # bare, suffix or full dotted path
        name: ^model\\.layers\\.([3-9]|\\d\\d)\\.    # and/or a regex searched in its name
        # holds: experts                    # or by what it holds: fused SiLU experts of any class
      replace:
        class: model.modules.moe.FusedMoE
        device: cpu
        kwargs: {kernel: generic}

Of the rules with a class, the first that matches a module replaces it; of those with a device
alone, the first that matches places it. A rule with ``check: true`` and a ``part`` (such as router
or norm) places nothing: it is an error if that part is elsewhere.

Source: KTransformers (SOSP 2025), section 5, Listing 1.

A file of this folder for each architecture, named after ``config.model_type``, holds the rules used
when none are given, ``any.yaml`` those of every other one; one of ``sets/`` holds some that go
before them (``--rules int4,gpu``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

from .ktransformers import accepted
from .read import load_rules, parse_rules
from .schema import Match, Part, Replace, Rule

_FOLDER = Path(__file__).parent
_ANY = _FOLDER / "any.yaml"
_SETS = _FOLDER / "sets"

Rules = str | Path | Sequence[Rule | dict[str, Any]] | None
"""A YAML file, names of sets, a list of rules, or None for those of the architecture."""


def known_architectures() -> list[str]:
    """The `model_type`s that have rules here."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml") if file != _ANY)


def known_sets() -> list[str]:
    """Names of the rules that can go before an architecture's own."""
    return sorted(file.stem for file in _SETS.glob("*.yaml"))


def default_rules(model_type: str) -> list[Rule]:
    """The shipped rules of an architecture, or those of any."""
    known = model_type in known_architectures()
    return load_rules(_FOLDER / f"{model_type}.yaml" if known else _ANY)


def resolve_rules(rules: Rules, model_type: str) -> list[Rule]:
    """Rules as given, from a file, of sets and the architecture, or of the architecture alone; in
    our names, where they have KTransformers'.

    Raises:
        PykernelsError: what is neither a file nor a set; a rule that is none; a name of
            KTransformers' that has no counterpart.
    """
    if rules is None:
        return default_rules(model_type)
    if not isinstance(rules, (str, Path)):
        return accepted(parse_rules(rules, "the given rules"))
    names = [name.strip() for name in str(rules).split(",")]
    if Path(rules).exists() or not set(names) & set(known_sets()):
        if not Path(rules).exists() and Path(rules).suffix not in (".yaml", ".yml"):
            raise _no_such(str(rules))
        return accepted(load_rules(Path(rules)))
    for name in names:
        if name not in known_sets():
            raise _no_such(name)
    before = [rule for name in names for rule in load_rules(_SETS / f"{name}.yaml")]
    return before + default_rules(model_type)


def _no_such(name: str) -> PykernelsError:
    return PykernelsError(
        f"The rules {name} are neither a file nor a shipped set",
        f"Give a YAML file, or some of {', '.join(known_sets())}, with commas between",
    )


__all__ = [
    "Match",
    "Part",
    "Replace",
    "Rule",
    "Rules",
    "default_rules",
    "known_architectures",
    "known_sets",
    "load_rules",
    "parse_rules",
    "resolve_rules",
]
