"""No op writes beside its results, and what lies beside its inputs changes nothing."""

from __future__ import annotations

import re

import pytest
import torch

from pykernels.errors import PykernelsError

from ..ops import AROUND, Op, Tensors, bits
from ..ops_attention import ATTENTION
from ..ops_delta_net import DELTA_NET
from ..ops_products import PRODUCTS
from ..ops_ranks import RANKS
from ..ops_step import STEP

GUARD = 4096
"""Bytes on either side of every tensor."""
FILLS = (0xFF, 0x3C)
"""NaN and -1 everywhere; small numbers everywhere."""

_SLOW = re.compile(
    "(3|16|40|300|1600) rows|(96|170|300|500) tokens|sort 700|experts (int8|int4-g128|q)"
    "|tiles (bf16|int8|q)|E4M3, window|128 heads|pages of 64"
    "|gqa_prefill, (window|heads of 96|pages)$"
)
"""What takes the interpreter long, and shows little more than its neighbours."""


def _row(op: Op) -> object:
    return pytest.param(op, id=op.name, marks=[pytest.mark.gpu] * bool(_SLOW.search(op.name)))


EVERY = (*AROUND, *PRODUCTS, *ATTENTION, *STEP, *RANKS, *DELTA_NET)
OPS = [_row(op) for op in EVERY]


class Guarded:
    """Copies of tensors, each in the middle of an allocation of its own."""

    def __init__(self, given: Tensors, fill: int) -> None:
        self.fill = fill
        self.buffers = {
            name: torch.full((2 * GUARD + x.nbytes,), fill, dtype=torch.uint8, device=x.device)
            for name, x in given.items()
        }
        self.tensors = {
            name: self.buffers[name][GUARD:-GUARD].view(x.dtype).view(x.shape).copy_(x)
            for name, x in given.items()
        }

    def check(self) -> None:
        for name, buffer in self.buffers.items():
            for side, guard in (("before", buffer[:GUARD]), ("behind", buffer[-GUARD:])):
                touched = (guard != self.fill).nonzero()
                assert not len(touched), f"{len(touched)} bytes {side} {name} were written"


@pytest.mark.parametrize("op", OPS)
def test_only_results_are_written_and_only_inputs_are_read(op: Op, device: torch.device) -> None:
    given = op.make(device)
    found = []
    for fill in FILLS:
        guarded = Guarded(given, fill)
        found.append([bits(x) for x in op.results(guarded.tensors)])
        guarded.check()
        for name, x in given.items():
            if name not in op.written:
                assert torch.equal(bits(guarded.tensors[name]), bits(x)), f"{name} was changed"
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), "the result depends on what lies beside the inputs"


_GAPS = {
    "route 1 tokens",
    "gate 1 tokens, torch.float32",
    "sort 13 tokens",
    "rms_norm of 100",
    "embed",
    "mla_read, bf16",
    "greedy",
    "sample, all inputs",
    "count_tokens",
    "gqa_rope_cache_write, E4M3",
    "mla_rope_cache_write",
    "submit",
    "combine",
    "post_norm",
    "softcap",
    "per_head_linear 2 tokens",
    "rope_table",
    "quantize_fp8",
    "unpack_tiles fp8 to fp8",
    "linear int8 1 rows bf16",
    "gqa_decode, bf16, pages of 16",
    "mla_decode, 16 heads, bf16, pages of 16",
    "mla_prefill",
    "gated_delta_rule, 1 tokens",
    "causal_conv1d, 1 tokens",
    "delta_step",
    "gated_rms_norm",
    "sigmoid_mul",
    "delta_gates",
}
"""An op for each launcher, on which alone it depends; sums of experts are in test_supports.py."""


def _spread(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, two neighbours of a dimension with another of its values between them."""
    plain = x.view(torch.uint8) if x.itemsize == 1 else x
    wide = torch.stack((plain, plain.flip(dim)), dim + 1).flatten(dim, dim + 1)
    return wide.unflatten(dim, (-1, 2)).select(dim + 1, 0).view(x.dtype)


SPREAD = [
    op for op in (*AROUND, *PRODUCTS, *ATTENTION, *STEP, *RANKS, *DELTA_NET) if op.name in _GAPS
]


@pytest.mark.parametrize("op", SPREAD, ids=[op.name for op in SPREAD])
def test_gaps_between_elements_are_minded_or_refused(op: Op, device: torch.device) -> None:
    given = op.make(device)

    def results(**changed: torch.Tensor) -> list[torch.Tensor]:
        """On copies: some ops write to their inputs."""
        tensors = {name: x.clone() for name, x in given.items()}
        return [bits(x) for x in op.results(tensors | changed)]

    expected = results()
    for name, x in given.items():
        if name.endswith((" data", " scale")):  # of matrices, which their packer lays out
            continue
        for dim in {0, x.ndim - 1}:
            try:
                found = results(**{name: _spread(x, dim)})
            except PykernelsError:
                continue
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"gaps in dimension {dim} of {name} are not seen"
