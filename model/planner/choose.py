"""The fastest way in which a model fits a machine, and what would fit where none does."""

from __future__ import annotations

from dataclasses import replace

from pykernels.errors import PykernelsError
from runtime.planning.placement import CPU

from ..random_model import weight_bytes
from .placing import GIB, Placed, placed
from .predict import Prediction, predict
from .settings import Case

FORMATS = ("bf16", "fp8", "q8_0", "q6_k", "q4_k", "iq4_xs", "q3_k", "q2_k", "iq2_xxs")
"""Formats that are proposed, largest first."""


def best(case: Case, device: str | None) -> Prediction:
    """The prediction of a case on the device that was asked for, or on the fastest one.

    Args:
        device: see ``ExecutionConfig``; None: any that the machine has.

    Raises:
        PykernelsError: it does not fit; what would.
    """
    devices = [device] if device is not None else _devices(case)
    found = [placed(replace(case, execution=replace(case.execution, device=d))) for d in devices]
    fitting = [each for each in found if each.fits]
    if not fitting:
        raise _too_large(found[-1])
    return min((predict(each) for each in fitting), key=lambda each: each.request_s)


def _devices(case: Case) -> list[str]:
    """The CPU, and one GPU, and all of them, if these are as many as the model has layers for."""
    names = case.machine.gpus
    return list(dict.fromkeys([CPU, *names[:1], ",".join(names)])) if names else [CPU]


def _too_large(found: Placed) -> PykernelsError:
    case, needs = found.case, {name: m for name, m in found.memory.items() if m.free < 0}
    told = ", ".join(
        f"{name} needs {m.needed / GIB:.1f} GiB of {m.has / GIB:.1f}" for name, m in needs.items()
    )
    own = weight_bytes(case.subject.fmt)
    weights = sum(m.weights for m in found.memory.values())
    over = sum(-m.free for m in needs.values())
    smaller = [
        fmt
        for fmt in FORMATS
        if weight_bytes(fmt) < own and weights * (1 - weight_bytes(fmt) / own) > over
    ]
    layers = case.subject.config.num_hidden_layers
    memory = sum(m.needed for m in found.memory.values())
    hint = f"It would in {smaller[0]}" if smaller else "No format of ours makes it fit"
    cache = max(m.cache for m in found.memory.values())
    if cache > over:
        hint += ", or with a shorter --context and a smaller --batch"
    hint += f", or with {memory / GIB / 0.94:.0f} GiB of memory for its {layers} layers"
    return PykernelsError(
        f"{case.subject.given} in {case.subject.fmt} does not fit {case.machine.name}: {told}", hint
    )
