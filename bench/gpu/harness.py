"""One case timed: a graph of many calls on rotating inputs, in turns with its peers.

Each op's file beside this one (``attention.py``, ``moe.py``, ``linear.py``, ``router.py``,
``around.py``) has

- ``cases(device, quick=False) -> Iterator[Case]``: the table's rows, heaviest tensors made as late
  as possible (a generator), so that one case's memory is free before the next one's is taken;
- ``case(device, **flags) -> Case``: one case from the flags of ``pykernels bench OP`` (integers and
  strings; see ``bench/cli.py`` for their names and defaults).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

from pykernels.errors import PykernelsError

from .roofs import Roofs, measure_roofs
from .timer import L2_SHARE, Timer, l2_bytes, make_timer

Row = dict[str, Any]
Call = Callable[[], object]

MAX_SETS = 64


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        op: attention, moe, linear, router or around.
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
    turn = 0

    def call(**options: object) -> object:
        nonlocal turn
        arguments = sets[turn % len(sets)]
        turn += 1
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


def going_on(op: str, name: str, cases: Iterator[Case]) -> Iterator[Case]:
    """The cases; where making one fails, a case ``name`` that fails so when it runs ends them."""
    try:
        yield from cases
    except Exception as error:
        yield _failing(op, name, error)


def _failing(op: str, name: str, error: Exception) -> Case:
    failure = error.with_traceback(None)  # whose frames hold tensors

    def run() -> None:
        raise failure

    return Case(op, name, {}, run, 1, 0)


def measure(
    case: Case, device: torch.device, seconds: float = 0.4, roofs: Roofs | None = None
) -> Row:
    """Times the case and its peers in turns for about ``seconds`` each; one flat dict.

    Rates are of 1e9 bytes and 1e12 operations; ``roof_us`` is the larger of the bytes over the read
    roof and the operations over the matmul roof, ``roof_share`` that over the median.
    A peer that fails leaves ``why_<peer>``; ours raises.
    """
    roofs = roofs or measure_roofs(device)
    timer = make_timer(device)
    ours = timer.prepare(case.run, case.sets, seconds)
    peers, row = _peers(case, timer, seconds)
    times: dict[str, list[float]] = {name: [] for name in ("", *peers)}
    for _ in range(ours.rounds):
        times[""].append(ours())
        for name, call in peers.items():
            if len(times[name]) < call.rounds:  # a slow peer has fewer turns
                times[name].append(call())
    us = [1e6 * t for t in times[""]]
    tenths = quantiles(us, n=10) if len(us) > 1 else us * 9
    figures = rates(case, median(us), roofs)
    head: Row = {"op": case.op, "name": case.name, **case.params}
    spread = {"us_p10": round(tenths[0], 3), "us_p90": round(tenths[-1], 3)}
    for name in peers:
        ratios = [theirs / mine for theirs, mine in zip(times[name], times[""], strict=False)]
        row[f"us_{name}"] = round(1e6 * median(times[name]), 3)
        row[f"x_{name}"] = round(median(ratios), 3)
        row[f"captured_{name}"] = peers[name].captured
    return {**head, **figures, **spread, "captured": ours.captured, "calls": ours.calls, **row}


def _peers(case: Case, timer: Timer, seconds: float) -> tuple[dict[str, Any], Row]:
    """Peers ready to be timed; the reason of each that is not."""
    ready, missing = {}, {}
    for name, call in case.peers.items():
        try:
            ready[name] = timer.prepare(call, case.sets, seconds)
        except Exception as error:
            missing[f"why_{name}"] = reason(error)
            timer.check()
    return ready, missing


def rates(case: Case, us: float, roofs: Roofs) -> Row:
    """The figures that follow from a median and the roofs."""
    compute = roofs.matmul_tflops * (2 if case.compute == "fp8" else 1)
    floors = {
        "memory": case.nbytes / roofs.read_gbps / 1e3,
        "compute": case.flops / compute / 1e6,
    }
    bound = max(floors, key=floors.__getitem__)
    gbps, tflops = case.nbytes / us / 1e3, case.flops / us / 1e6
    return {
        "us_median": round(us, 3),
        "nbytes": case.nbytes,
        "flops": case.flops,
        "gbps": round(gbps, 2),
        "tflops": round(tflops, 4),
        "read_roof_gbps": roofs.read_gbps,
        "copy_roof_gbps": roofs.copy_gbps,
        "matmul_roof_tflops": roofs.matmul_tflops,
        "read_share": round(gbps / roofs.read_gbps, 4),
        "copy_share": round(gbps / roofs.copy_gbps, 4),
        "matmul_share": round(tflops / roofs.matmul_tflops, 4),
        "bound": bound,
        "roof_us": round(floors[bound], 3),
        "roof_share": round(floors[bound] / us, 4),
    }


def reason(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, PykernelsError) else f"{type(error).__name__}: "
    return (kind + text)[:300]


@contextmanager
def quick_collections() -> Iterator[None]:
    """``gc.collect`` without what is there before: torch's modules take a tenth of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_all(
    op: str,
    cases: Iterable[Case],
    device: torch.device,
    seconds: float,
    roofs: Roofs,
) -> Iterator[Row]:
    """A row a case; a failing one is a row with ``why``. Ends early where the GPU's context died.

    A kernel's illegal access ends the CUDA context: nothing after it can run in this process.
    """
    timer, iterator = make_timer(device), iter(cases)
    with quick_collections():
        while True:
            row: Row = {"op": op, "name": "(the next case)"}
            try:
                case = next(iterator, None)
                if case is None:
                    return
                row = {"op": case.op, "name": case.name, **case.params}
                row = measure(case, device, seconds, roofs)
                failed = False
            except Exception as error:  # whatever it is, the other cases go on
                row, failed = {**row, "why": reason(error)}, True
            case = None
            gc.collect()  # a case's closures and tensors are a cycle now and then
            yield row
            if failed:
                timer.check()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # a capture cannot ask the allocator to give memory back
