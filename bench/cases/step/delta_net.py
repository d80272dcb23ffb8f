"""The gated delta rule: Qwen3-Next's layer (16 key heads, 32 value heads of 128), against
flash-linear-attention where it is installed (`pip install fla-core`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from bench.harness.timing.case import Case, Entry, rotating, sets_for
from pykernels import ref
from pykernels.gpu.delta_net.gated_delta_rule import gated_delta_rule
from pykernels.shapes import StateBatch
from pykernels.testing import relative_error

from ..peers.delta_net_fla import Inputs, fla

HK, HV, D = 16, 32, 128
EPS = 1e-6
COMPARED = 512
"""Tokens up to which a call is compared: the reference takes them in turn."""


def case(device: torch.device, sequences: int = 1, tokens: int = 1) -> Case:
    """A step of sequences that go on, each with so many tokens: 1 is a decode step."""
    S, T = sequences, sequences * tokens
    nbytes = 2 * 4 * S * HV * D * D + 2 * T * (2 * HK + 2 * HV) * D + 2 * 4 * T * HV
    sets = min(sets_for(nbytes, device), 32)
    inputs = [_inputs(S, T, device) for _ in range(sets)]
    starts = torch.arange(0, T, tokens, dtype=torch.int32, device=device)
    slots = torch.arange(S, dtype=torch.int32, device=device)
    batch = StateBatch(starts, torch.full_like(slots, tokens), slots, slots + 1, tokens)
    out = torch.empty(T, HV, D, dtype=torch.bfloat16, device=device)

    def run(*given: Any) -> torch.Tensor:
        q, k, v, g, beta, state = given
        return gated_delta_rule(q, k, v, g, beta, state, batch, eps=EPS, out=out)

    def error() -> float:
        q, k, v, g, beta, state = (tensor.cpu().clone() for tensor in inputs[0])
        vectors = (batch.starts, batch.lengths, batch.slots, batch.past)
        starts, lengths, slots, past = (vector.cpu() for vector in vectors)
        there = StateBatch(starts, lengths, slots, past, tokens)
        truth = ref.gated_delta_rule(q, k, v, g, beta, state, there, eps=EPS)
        return relative_error(run(*inputs[0]).cpu(), truth)

    return Case(
        "delta_net",
        "decode" if tokens == 1 else "prompt",
        {"sequences": S, "tokens": tokens, "key_heads": HK, "value_heads": HV, "head": D},
        rotating(run, inputs),
        nbytes,
        3 * 2 * T * HV * D * D,
        fla(inputs, S, tokens),
        sets,
        error=error if T <= COMPARED else None,
    )


def _inputs(S: int, T: int, device: torch.device) -> Inputs:
    """q, k, v, g, beta and states, of a size that they keep."""
    q, k = torch.randn(2, T, HK, D, device=device).bfloat16()
    v = torch.randn(T, HV, D, device=device).bfloat16()
    gates = -torch.rand(T, HV, device=device), torch.rand(T, HV, device=device)
    return q, k, v, *gates, torch.randn(S, HV, D, D, device=device)


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """The table's rows."""
    return (entry.case(device) for entry in table(quick))


def table(quick: bool = False) -> Iterator[Entry]:
    """Decode steps and prompts."""
    few = ((1, 1), (1, 4096))
    for sequences, tokens in few if quick else (*few, (16, 1), (1, 512), (1, 16384), (8, 512)):
        make = functools.partial(case, sequences=sequences, tokens=tokens)
        yield Entry("delta_net", f"S{sequences}-T{tokens}", make)
