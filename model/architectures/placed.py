"""Where rules place a model's weights, as the engine follows it beside a GPU."""

from __future__ import annotations

from pykernels.errors import PykernelsError
from runtime.program import Program

from ..modules.placement import Placement


def placed_weights(program: Program, placement: Placement) -> dict[str, str]:
    """The weights that rules place elsewhere than everything else, and where.

    Args:
        placement: by the names of modules; its root is the device that the engine runs on. Routed
            experts are where the engine's ``experts`` says.

    Raises:
        PykernelsError: a rule that the engine cannot follow: it keeps all keys and values on one
            device, and a weight of several parameters too.
    """
    root = placement.root
    found: dict[str, str] = {}
    for node in program.nodes:
        if node.role == "routed":
            continue
        for name in node.weights.values():
            parts = [part.name for part in program.weights[name].parts]
            devices = sorted({placement.of(part) for part in parts} - {root})
            if not devices:
                continue
            if node.role == "attention":
                raise PykernelsError(
                    f"a rule places {parts[0]} on {devices[0]}; the engine has attention and its"
                    f" keys and values on {root}",
                    "Use --eager, or leave out that rule",
                )
            if len({placement.of(part) for part in parts}) > 1:
                raise PykernelsError(
                    f"rules place {' and '.join(parts)} on several devices; the engine multiplies"
                    " them together",
                    "Place them on one",
                )
            found[name] = devices[0]
    return found
