"""Where ours runs in a comparison: on the CPU, on a GPU beside its experts on the CPU, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """One way of ours to run a model.

    Attributes:
        name: in the table and the plot; "" where there is only one.
        options: of ``ExecutionConfig``.
    """

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def places(device: str) -> tuple[Place, ...]:
    """The places that are compared on a device: "cpu" or "cuda:N"."""
    if device == "cpu":
        return (Place(),)
    hybrid = {"device": device, "experts": "cpu"}
    return (
        Place("experts on the CPU", hybrid),
        Place("experts on the CPU, deferral", hybrid | {"defer": "auto"}),
        Place("CPU alone"),
        Place("GPU alone", {"device": device, "experts": "gpu"}),
    )
