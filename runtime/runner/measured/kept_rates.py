"""The rates of prompts, kept from one load of a model to the next: to measure them takes seconds,
with large experts half a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import torch

from pykernels.env import Env, env
from pykernels.target import detect

from ...machine.kept import kept
from ...machine.tuning import slug
from ...planning.prefill_rates import Rates
from ...program import Program

_VERSION = 1  # part of the file's name: raise it when kernels change so much that it is outdated
_LINK = 0.1
"""Rates are measured again if the link is slower or faster by more than this share."""


def kept_rates(
    program: Program,
    gpus: Iterable[torch.device],
    threads: int,
    kernel: str,
    limits: tuple[int, bool],
    stream_s: float,
    measure: Callable[[], Rates],
) -> Rates:
    """What ``measure`` said at most a day ago on this CPU and these GPUs, else what it says now.

    Args:
        program: a step of the model, with its weights' formats and devices.
        gpus: of NVIDIA; ``threads``: of the CPU's workers; ``kernel``: of its experts, or "auto".
        limits: most tokens of a step, and whether steps can be split.
        stream_s: see ``Rates``; measured in this load.
    """
    devices = [torch.cuda.get_device_name(gpu) for gpu in gpus]
    weights, own = sorted(program.weights.items()), (threads, kernel, env.kernel, env.text(Env.isa))
    text = repr((program.nodes, weights, own, limits))
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    name = f"prefill-rates-{slug(' '.join((detect().cpu, *devices)))}-{digest}-v{_VERSION}"
    measured = kept(
        name,
        lambda: asdict(measure()),
        lambda rates: abs(_read(rates).stream_s - stream_s) <= _LINK * stream_s,
    )
    return _read(measured)


def _read(stored: dict[str, Any]) -> Rates:
    """Raises ``TypeError``, ``ValueError`` or ``LookupError`` where it is no ``Rates``."""
    points = {
        name: tuple((int(tokens), float(value)) for tokens, value in stored[name])
        for name in ("cpu", "split", "shares")
    }
    return Rates(float(stored["stream_s"]), **points)
