"""What a model's blocks are named by: all that decides what its keys and values are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..kv_cache.layout import PAGE
from ..planning.execution import ExecutionPlan
from ..planning.lowerable import Lowerable
from .block import VERSION

FINGERPRINT_BYTES = 16


def fingerprint(model: Lowerable, plan: ExecutionPlan, layout: str, weights: bytes) -> bytes:
    """16 bytes that are others for another model, format of weights or layout of pages.

    They do not depend on the device and its kernels, which compute the same within their
    precision, nor on how a step is cut.

    Args:
        plan: of a runner that is bound: what it has measured is decided.
        layout: of its pages (``PageStore``).
        weights: what tells the values of the model's weights from any others.
    """
    program = model.lower()
    parts: Sequence[object] = (
        VERSION,
        PAGE,
        layout,
        plan.deferred,
        program,
        sorted(map(repr, program.weights.values())),
        weights,
    )
    found = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()
