"""Injection rules in YAML: which modules to replace, and by which operator.

    - match:
        class: modeling_deepseek_v3.DeepseekV3MoE   # bare, suffix or full dotted path
        name: ^model\\.layers\\.([3-9]|\\d\\d)\\.    # and/or a regex searched in its name
        # holds: experts                    # or by what it holds: fused SiLU experts of any class
      replace:
        class: model.modules.moe.FusedMoE
        device: cpu
        kwargs: {kernel: generic}

Source: KTransformers (SOSP 2025), section 5 and Listing 1. One file of this folder for each
architecture, named after `config.model_type`, holds the rules used when none are given; `any.yaml`
those of every other one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from pykernels.errors import PykernelsError

_FOLDER = Path(__file__).parent
_ANY = _FOLDER / "any.yaml"


class Match(BaseModel):
    """Which modules: all given clauses must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cls: str | None = Field(default=None, alias="class")
    name: str | None = None
    holds: Literal["experts"] | None = None

    @field_validator("name")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _has_a_clause(self) -> Match:
        if self.cls is None and self.name is None and self.holds is None:
            raise ValueError("match needs a class, a name or both, or what it holds")
        return self


class Replace(BaseModel):
    """By which operator, on which device, and with which arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cls: str = Field(alias="class")
    device: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Rule(BaseModel):
    """One match clause with its replace clause."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: Match
    replace: Replace
    _origin: str = PrivateAttr(default="a rule")

    @property
    def origin(self) -> str:
        """The file and the rule's number in it, for errors."""
        return self._origin


def known_architectures() -> list[str]:
    """The `model_type`s that have rules here."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml") if file != _ANY)


def default_rules(model_type: str) -> list[Rule]:
    """The shipped rules of an architecture, or those of any."""
    known = model_type in known_architectures()
    return load_rules(_FOLDER / f"{model_type}.yaml" if known else _ANY)


def load_rules(file: Path) -> list[Rule]:
    """Parse a rules file; `PykernelsError` names the file and the rule's number (from 1)."""
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PykernelsError(
            f"The rules {file} cannot be read: {error}", "Give an existing YAML file"
        ) from None
    except yaml.YAMLError as error:
        raise PykernelsError(f"{file} is not valid YAML: {error}", "Correct the file") from None
    return parse_rules(entries, str(file))


def parse_rules(entries: object, origin: str) -> list[Rule]:
    """A list of mappings (or ready `Rule`s) to rules."""
    if not isinstance(entries, Iterable) or isinstance(entries, (str, dict)):
        raise PykernelsError(
            f"{origin} is no list of rules", "Write a list of items with match and replace"
        )
    return [_parse(entry, f"{origin}, rule {i}") for i, entry in enumerate(entries, 1)]


def _parse(entry: object, origin: str) -> Rule:
    if isinstance(entry, Rule):
        return entry
    if not isinstance(entry, dict):
        raise PykernelsError(f"{origin} is no mapping", "Write it with the keys match and replace")
    try:
        rule = Rule.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise PykernelsError(
                f"{origin}: unknown key {where!r}",
                "The keys are match: {class, name, holds} and replace: {class, device, kwargs}",
            ) from None
        reason = first["msg"].removeprefix("Value error, ")
        raise PykernelsError(f"{origin}: {where}: {reason}", "Correct the rule") from None
    rule._origin = origin
    return rule
