"""The doctor's report: facts by section, some of them problems with a hint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One line of the report; `problem` is empty or what is wrong, `hint` what to do about it."""

    name: str
    value: str
    problem: str = ""
    hint: str = ""


@dataclass
class Report:
    """Facts by section."""

    sections: dict[str, list[Fact]] = field(default_factory=dict)

    @property
    def problems(self) -> list[Fact]:
        """The facts that keep pykernels from running, or from running well."""
        return [fact for facts in self.sections.values() for fact in facts if fact.problem]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: every section as {name: value}, and the problems with their hints."""
        sections = {
            section: {fact.name: fact.value for fact in facts}
            for section, facts in self.sections.items()
        }
        problems = [
            {"name": fact.name, "problem": fact.problem, "hint": fact.hint}
            for fact in self.problems
        ]
        return {**sections, "problems": problems}
