"""What prompts would take with all layers of a model of which some were timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.timing.rows import Row


@dataclass(frozen=True)
class Depth:
    """Layers of a model, and those of them with routed experts.

    Attributes:
        moe: by layers that were timed, how many of them have routed experts.
        whole: layers of the model; ``whole_moe``: of these.
    """

    moe: Mapping[int, int]
    whole: int
    whole_moe: int

    @classmethod
    def of(cls, layers: Sequence[Any], whole: int, counts: Sequence[int]) -> Depth:
        """Those of a decoder's ``layers``; what it has been cut of has routed experts."""
        found = {n: sum(layer.moe is not None for layer in layers[:n]) for n in counts}
        return cls(found, whole, whole - len(layers) + found[len(layers)])

    @property
    def most(self) -> int:
        """Layers of the deepest that were timed."""
        return max(self.moe)

    @property
    def said(self) -> str:
        """How, for a table; "": all layers were timed."""
        if self.most >= self.whole:
            return ""
        if len(self.moe) > 1:
            few = min(self.moe)
            return (
                f"{self.whole} layers: not timed; {self.most} were, and {few}: each layer more is"
                " taken to add as much"
            )
        return (
            f"{self.whole} layers: not timed; {self.most} were, {self.moe[self.most]} of them with"
            " routed experts, to which all of the time is put down, so it is rather less"
        )

    def seconds(self, rows: Sequence[Row], way: str, tokens: int) -> float | None:
        """Seconds that the whole model takes; None: its rows are not there."""
        by_layers = {
            row["layers"]: row["seconds"]
            for row in rows
            if row["way"] == way and row["tokens"] == tokens and "seconds" in row
        }
        if self.most not in by_layers:
            return None
        deep, deep_moe = by_layers[self.most], self.moe[self.most]
        if self.most >= self.whole:
            return float(deep)
        few = min(self.moe)
        if few < self.most:
            if few not in by_layers:
                return None
            each = (deep - by_layers[few]) / (deep_moe - self.moe[few])
            return float(deep + each * (self.whole_moe - deep_moe))
        return float(deep * self.whole_moe / deep_moe)
