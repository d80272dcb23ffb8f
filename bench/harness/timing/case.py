"""One operation at one size, as a benchmark of the GPU times it.

Each op's file in ``bench/cases`` (``attention.py``, ``moe.py``, ``linear.py``, ``router.py``,
``small_ops.py``, ``step/delta_net.py``, ``step/unpack_tiles.py``) has

- ``cases(device, quick=False) -> Iterator[Case]``: the table's rows. A generator, so that one
  case's memory is free before the next one's is taken;
- ``table(quick=False) -> Iterator[Entry]``, of the ops that have a suite in ``bench/suites``: the
  same rows before their tensors are made;
- ``case(device, **flags) -> Case``: one case from the flags of ``pykernels bench OP`` (integers and
  strings; see ``bench/cli.py`` for their names and defaults).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .timer import L2_SHARE, l2_bytes

Call = Callable[[], object]

MAX_SETS = 64


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        op: attention, moe, linear, router, delta_net, small_ops or unpack_tiles.
        name: what runs, the same for all sizes of it: "mla decode".
        params: sizes and formats, flat: they become columns of the JSON.
        run: one call of our kernel; capturable in a CUDA graph. It may take its next set of inputs
            on each call (see ``rotating``).
        nbytes: fewest bytes of device memory that a call must move (each input read once, each
            output written once; of weights only what this call's routing touches).
        flops: multiplications and additions that it must do, 2 for a multiply-add.
        peers: what else does the same, by name ("torch sdpa").
        sets: input sets that ``run`` (and each peer) rotates over, 1 if its input alone is larger
            than L2.
        compute: the roof of ``flops``: "bf16" (measured) or "fp8" (twice that).
        error: makes a call and tells how far its result is from ``pykernels.ref``'s: the relative
            error of some of its rows; None: it is not compared.
    """

    op: str
    name: str
    params: dict[str, int | str]
    run: Call
    nbytes: int
    flops: int
    peers: dict[str, Call] = field(default_factory=dict)
    sets: int = 1
    compute: str = "bf16"
    error: Callable[[], float] | None = None

    @property
    def head(self) -> dict[str, Any]:
        """What names its row."""
        return {"op": self.op, "name": self.name, **self.params}


@dataclass(frozen=True)
class Entry:
    """A row of an op's table before its tensors are made.

    Attributes:
        name: format and sizes, without spaces.
        make: the case on a device.
    """

    op: str
    name: str
    make: Callable[[torch.device], Case]

    def case(self, device: torch.device) -> Case:
        """Its case; where making it fails, one that fails so when it runs.

        In a generator of cases an exception would be the end of all that follow.
        """
        try:
            return self.make(device)
        except Exception as error:
            return _failing(self.op, self.name, error)


def sets_for(nbytes: int, device: torch.device) -> int:
    """Input sets of ``nbytes`` each that together do not fit in L2, at most ``MAX_SETS``.

    Beyond that the inputs are so small that in a model, too, the kernel before left them in L2.
    """
    wanted = L2_SHARE * l2_bytes(device)
    return max(1, min(MAX_SETS, -(-wanted // max(1, nbytes))))


def rotating(
    function: Callable[..., object], sets: Sequence[tuple[Any, ...]]
) -> Callable[..., object]:
    """A call that gives ``function`` the next set's arguments each time, round and round.

    Keywords of the call are passed on.
    """
    number = 0

    def call(**options: object) -> object:
        nonlocal number
        arguments = sets[number % len(sets)]
        number += 1
        return function(*arguments, **options)

    return call


def built(op: str, make: Callable[..., Case], *arguments: Any) -> Case:
    """``make(*arguments)``; if that fails, a case that fails so when it runs.

    In a generator of cases an exception would be the end of all that follow.
    """
    try:
        return make(*arguments)
    except Exception as error:
        sizes = " ".join(str(a) for a in arguments if not isinstance(a, torch.device))
        return _failing(op, f"{make.__name__} {sizes}", error)


def _failing(op: str, name: str, error: Exception) -> Case:
    failure = error.with_traceback(None)  # whose frames hold tensors

    def run() -> None:
        raise failure

    return Case(op, name, {}, run, 1, 0)
