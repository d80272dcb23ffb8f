"""What a rule is: a match clause and a replace clause, checked."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator


def is_device(name: Any) -> bool:
    """Whether it is a device's name, here or on another machine."""
    return isinstance(name, str) and re.fullmatch(r"cpu|cuda:\d+", name) is not None


Part = Literal["attention", "rotary", "router", "experts", "block", "mlp", "norm", "model"]
"""What a module does in a model, whatever it is called there."""


class Match(BaseModel):
    """Which modules: all given clauses must hold.

    ``part`` is for rules that check a place (``Rule.check``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cls: str | None = Field(default=None, alias="class")
    name: str | None = None
    holds: Literal["experts", "mla"] | None = None
    part: Part | None = None

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
        if (self.cls, self.name, self.holds, self.part) == (None,) * 4:
            raise ValueError("match needs a class, a name or both, or what it holds")
        return self


class Replace(BaseModel):
    """The operator that replaces a module, its device and its arguments.

    Without a class the module stays what it is and only its place changes: it runs on ``device``
    with everything in it, or, where that is a list, the modules that match are dealt to the
    devices in order, in equal runs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cls: str | None = Field(default=None, alias="class")
    device: str | tuple[str, ...] | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("device", mode="before")
    @classmethod
    def _is_a_device(cls, value: Any) -> Any:
        if value is None:
            return None
        names = value if isinstance(value, (list, tuple)) else [value]
        if not names:
            raise ValueError("device is an empty list")
        for name in names:
            if not is_device(name):
                raise ValueError(f"{name!r} is no device: write cpu, or cuda:0 and so on")
        return tuple(names) if isinstance(value, (list, tuple)) else value

    @model_validator(mode="after")
    def _does_something(self) -> Replace:
        if self.cls is None and self.device is None:
            raise ValueError("replace needs a class, a device or both")
        if self.cls is None and self.kwargs:
            raise ValueError("kwargs are a class's, and there is none")
        if self.cls is not None and isinstance(self.device, tuple):
            raise ValueError("a list of devices is for a rule without a class")
        return self


class Rule(BaseModel):
    """One match clause with its replace clause.

    With ``recursive`` false no rule replaces what is in the module that it puts there. With
    ``check`` it places nothing: the engine refuses to start unless the parts of the model that it
    matches are on its device already. With ``optional`` it may match nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: Match
    replace: Replace
    recursive: bool = True
    check: bool = False
    optional: bool = False
    _origin: str = PrivateAttr(default="a rule")

    @model_validator(mode="after")
    def _checks_a_part(self) -> Rule:
        alone = self.replace.cls is None and isinstance(self.replace.device, str)
        if self.check and not (alone and self.match.part):
            raise ValueError("check is for a part and one device, without a class")
        if self.match.part and not self.check:
            raise ValueError("part is for a rule with check: true")
        return self

    @property
    def origin(self) -> str:
        """The file and line that it begins on, or its number in a list, for errors."""
        return self._origin

    @property
    def clauses(self) -> str:
        """What it matches, in words."""
        match = self.match
        given = {
            "class": match.cls,
            "name": match.name,
            "holds": match.holds,
            "part": match.part,
        }
        return " and ".join(f"{key} {value!r}" for key, value in given.items() if value is not None)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that it names."""
        device = self.replace.device
        return (device,) if isinstance(device, str) else device or ()


KEYS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("match", "replace", "recursive", "check", "optional"),
    ("match",): ("class", "name", "holds", "part"),
    ("replace",): ("class", "device", "kwargs"),
}
"""What each mapping of a rule may hold, by where it stands."""
