"""One case of the GPU timed: a graph of many calls on rotating inputs, in turns with its peers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from .case import Case
from .roofs import Roofs, measure_roofs
from .rows import Row, against, figures, reason
from .timer import Ready, Timer, make_timer
from .turns import Times, alternate


def measure(
    case: Case, device: torch.device, seconds: float = 0.4, roofs: Roofs | None = None
) -> Row:
    """Times the case and its peers in turns for about ``seconds`` each; one row.

    A peer that fails leaves ``why_<peer>``; ours raises.
    """
    roofs = roofs or measure_roofs(device)
    timer = make_timer(device)
    ready = {"": timer.prepare(case.run, case.sets, seconds)}
    peers, failed = _peers(case, timer, seconds)
    ready |= peers
    ours = ready[""]
    times = alternate(ready, {name: min(r.rounds, ours.rounds) for name, r in ready.items()})
    found = figures(
        times[""],
        [case.nbytes],
        case.flops,
        roofs.read_gbps,
        roofs.compute(case.compute),
        case.compute,
    )
    row = against(times[""], {name: times[name] for name in peers} | failed)
    row |= {f"captured_{name}": peer.captured for name, peer in peers.items()}
    return {**case.head, **found, "captured": ours.captured, "calls": ours.calls, **row}


def _peers(case: Case, timer: Timer, seconds: float) -> tuple[dict[str, Ready], dict[str, Times]]:
    """Peers ready to be timed; the reason of each that is not."""
    ready, failed = {}, {}
    for name, call in case.peers.items():
        try:
            ready[name] = timer.prepare(call, case.sets, seconds)
        except Exception as error:
            failed[name] = Times(why=reason(error))
            timer.check()
    return ready, failed


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
    """A row a case; a failing one is a row with ``why``.

    Raises:
        PykernelsError: after that row, where a kernel's illegal access has ended the CUDA context:
            nothing more can run in this process.
    """
    timer, iterator = make_timer(device), iter(cases)
    with quick_collections():
        while True:
            row: Row = {"op": op, "name": "(the next case)"}
            try:
                case = next(iterator, None)
                if case is None:
                    return
                row = case.head
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
