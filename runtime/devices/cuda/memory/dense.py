"""Dense weights that lie in main memory and cross to their GPU in each step: pinned."""

from __future__ import annotations

from collections.abc import Iterator

from pykernels.errors import PykernelsError

from ....machine.pinned import Pinned
from ....planning.placement import CPU
from ....program import Program
from ....program.node import Node
from ....program.weights import LayoutOf, WeightStore
from .blocks import Staged


def pin_staged(program: Program, store: WeightStore, layout_of: LayoutOf, pinned: Pinned) -> None:
    """Pins the weights that cross in a program's steps.

    Raises:
        PykernelsError: the system does not allow it.
    """
    for node, port in _loaded(program):
        held: Staged = store.get(program.weight(node, port), *layout_of(node, port))
        if reason := pinned.add(held.memory):
            raise PykernelsError(
                f"dense weights cannot cross to the GPU: {reason}",
                "Raise the limit of locked memory (ulimit -l), or leave dense_gib at auto",
            )


def _loaded(program: Program) -> Iterator[tuple[Node, str]]:
    for node in program.nodes:
        if node.op == "load_weights" and node.device != CPU:
            for port in node.weights:
                yield node, port
