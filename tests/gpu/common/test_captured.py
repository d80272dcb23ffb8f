"""Every op in a CUDA graph: replayed on other inputs, it gives eager's bits, and never waits."""

from __future__ import annotations

import pytest
import torch

from ..ops import AROUND, Op, Tensors, bits
from ..ops_attention import ATTENTION
from ..ops_delta_net import DELTA_NET
from ..ops_products import PRODUCTS
from ..ops_ranks import RANKS
from ..ops_step import STEP

OPS = (*AROUND, *PRODUCTS, *ATTENTION, *STEP, *RANKS, *DELTA_NET)


def fill(held: Tensors, seed: int, op: Op, device: torch.device) -> None:
    """Other values, lengths, experts and places into the same tensors; results are NaN again."""
    torch.manual_seed(seed)
    for name, values in op.make(device).items():
        held[name].copy_(values)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_a_replay_has_the_bits_of_an_eager_call(op: Op, device: torch.device) -> None:
    held = op.make(device)
    op.run(held)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.run(held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.results(held)
    seen = []
    for seed in (1, 2):
        fill(held, seed, op, device)
        graph.replay()
        replayed = [bits(x) for x in captured]
        fill(held, seed, op, device)
        for found, eager in zip(replayed, op.results(held), strict=True):
            assert torch.equal(found, bits(eager))
        seen.append(torch.cat(replayed))
    assert not torch.equal(*seen)  # the inputs did change
