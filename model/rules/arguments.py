"""The arguments of a rule with KTransformers' names: each is taken, or refused by its name."""

from __future__ import annotations

from typing import Any

from pykernels.errors import PykernelsError

from .schema import Rule, is_device


class Arguments:
    """A rule's kwargs, taken one by one; what is left over is refused."""

    def __init__(self, rule: Rule) -> None:
        self.origin, self.cls = rule.origin, str(rule.replace.cls).rpartition(".")[2]
        self._left, self._known = dict(rule.replace.kwargs), list[str]()

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Any:
        """The value; None where there is none."""
        self._known.append(name)
        return self._left.pop(name, None)

    def choose(self, name: str, values: dict[Any, str]) -> str | None:
        """What the value stands for; names in any case."""
        value = self.take(name)
        if value is None:
            return None
        for known, meaning in values.items():
            if str(known).lower() == str(value).lower():
                return meaning
        raise self.refused(name, value, f"Use {', '.join(map(str, values))}")

    def device(self, name: str) -> str | None:
        """The device that an argument names; None where there is none."""
        value = self.take(name)
        return None if value is None else self.as_device(name, value)

    def as_device(self, name: str, value: Any) -> str:
        """A device as ours is written. Raises PykernelsError, which names the argument."""
        if value == "cuda":
            return "cuda:0"
        if not is_device(value):
            raise self.refused(name, value, "Write cpu, cuda, or cuda:0 and so on")
        return str(value)

    def refused(self, name: str, value: Any, hint: str) -> PykernelsError:
        return PykernelsError(f"{self.origin}: {self.cls} has no {name} {value!r}", hint)

    def rest(self) -> None:
        """Raises PykernelsError if an argument was not taken."""
        for name in self._left:
            known = ", ".join(self._known)
            raise PykernelsError(f"{self.origin}: {self.cls} has no {name}", f"It has {known}")
