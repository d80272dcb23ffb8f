"""How many experts fit in memory, ours beside those of every peer that is up at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from bench.peers.catalog import Peer
from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape
from runtime.devices.cpu.routed import CpuExperts
from runtime.profiling.roofline import roof_bytes
from runtime.profiling.workload import layers_out_of_cache

H, I, TOPK = 7168, 2048, 8  # noqa: E741 - DeepSeek-V3's experts
EXPERTS = (32, 16, 8)

SHARE = 0.92
"""The share of the free memory for ``group_bytes``: the rest is for calls, and for the machine."""

OURS = 1 << 30
"""What our process grows by from now on, beside weights: kernels of every format, and LLVM, where
none is cached. Measured (VmRSS): 0.13 GiB after one format, 0.75 after eight."""

PROCESS = {
    "kt-kernel": 270 << 20,
    "llama.cpp": 60 << 20,
    "torch": 250 << 20,
    "numpy": 40 << 20,
}
"""A peer's process without weights and calls: measured (VmRSS), but llama.cpp's is NumPy's with
some room for the libraries of ggml."""

_FIRST = 4.7
"""Bytes a weight of the expert that the others are copies of, while a peer loads: in float32, and
the matrix at hand once more. Measured (VmHWM - VmRSS): 1.0 to 4.7."""


def held_by(peer: Peer, shape: MoEShape) -> MoEShape:
    """The layer as this peer has it: perhaps of fewer experts."""
    return replace(shape, E=peer.experts(shape.E, shape.topk))


def peer_layers(peer: Peer, shape: MoEShape, l3: int) -> int:
    """Layers that take turns in a peer, so that its weights come from memory."""
    return layers_out_of_cache(l3, _layer_bytes(peer, shape, peer.bytes_per_weight))


def group_bytes(fmt: str, peers: Collection[Peer], shape: MoEShape, l3: int) -> float:
    """Bytes in memory while calls in ``fmt`` are timed against ``peers``: the processes, the read
    roof's buffer, the weights, and what the one that needs most takes while it loads."""
    loading = max(
        (_layer_bytes(p, shape, p.loading) + _FIRST * shape.weights for p in peers), default=0.0
    )
    processes = OURS + roof_bytes() + sum(PROCESS[p.engine] for p in peers)
    layers = [
        CpuExperts.bytes_needed(shape, fmt),
        *(_layer_bytes(p, shape, p.bytes_per_weight) for p in peers),
    ]
    return processes + loading + sum(nbytes * layers_out_of_cache(l3, nbytes) for nbytes in layers)


def layer_shape(
    memory: int,
    l3: int,
    formats: Iterable[str],
    peers: Callable[[str, MoEShape], Collection[Peer]],
    most: int = EXPERTS[0],
) -> tuple[MoEShape, str]:
    """DeepSeek-V3's layer with as many experts as fit, and why there are fewer than ``most``.

    Args:
        memory: free bytes.
        l3: bytes of the last-level cache.
        peers: those that are up together, by format.

    Raises:
        PykernelsError: not even the fewest fit.
    """
    why = ""
    for E in (E for E in EXPERTS if E <= most):
        shape = MoEShape(E, H, I, TOPK)
        need, fmt = max((group_bytes(f, peers(f, shape), shape, l3), f) for f in formats)
        if need <= SHARE * memory:
            return shape, why and f"{E} experts: {why}"
        others = ", ".join(dict.fromkeys(peer.engine for peer in peers(fmt, shape)))
        why = why or (
            f"{E} in {fmt}{f' beside {others}' if others else ''} are {need / 2**30:.1f} GiB,"
            f" {SHARE:.0%} of free memory {SHARE * memory / 2**30:.1f}"
        )
    raise PykernelsError(
        f"{memory / 2**30:.1f} GiB are free, the smallest layer needs {need / SHARE / 2**30:.1f}"
        f" ({fmt}{f' beside {others}' if others else ''})",
        "Free some memory, or take fewer --peers" if others else "Free some memory",
    )


def _layer_bytes(peer: Peer, shape: MoEShape, bytes_per_weight: float) -> float:
    held = held_by(peer, shape)
    return held.E * held.weights * bytes_per_weight
