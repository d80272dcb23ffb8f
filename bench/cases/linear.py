"""Linears with quantized weights, from one row on, against torch's on bf16 and E4M3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from bench.harness.timing.case import Case, Entry, rotating, sets_for
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.weights import Matrices

from . import truth
from .weights import activations_for, random_stack

SHAPES = ((7168, 7168), (18432, 7168), (7168, 18432))
"""(outputs, inputs): about an attention's output, a dense layer's gate and its down projection."""


def _scaled_mm(x: torch.Tensor, w: torch.Tensor, K: int) -> Callable[[], object]:
    """torch's E4M3 product with one scale a row: the nearest that it has on every version."""
    M, N = x.shape[0], w.shape[0]
    codes = x.to(torch.float8_e4m3fn)
    scales = (torch.ones(n, device=x.device) for n in (M, N))
    a, b = (s.view(shape) for s, shape in zip(scales, ((M, 1), (1, N)), strict=True))
    return lambda: torch._scaled_mm(
        codes, w.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def case(
    device: torch.device,
    format: str = "int4",
    tokens: int = 1,
    inputs: int = 7168,
    outputs: int = 7168,
    activations: str = "auto",
) -> Case:
    """One linear; activations: see ``activations_for``."""
    M, N, K = tokens, outputs, inputs
    activations = activations_for(format, M, activations)
    first = random_stack(format, 1, N, K, device)
    read = first.nbytes + 2 * M * K
    stacks = [first, *(random_stack(format, 1, N, K, device) for _ in range(_more(read, device)))]
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    sets = [(torch.randn(M, K, device=device).bfloat16(), stack) for stack in stacks]

    def run(x: torch.Tensor, stack: Matrices) -> torch.Tensor:
        return linear(x, stack, activations=activations, out=out)

    dense = [torch.randn(N, K, device=device).bfloat16() for _ in sets]
    pairs = [(x, w) for (x, _), w in zip(sets, dense, strict=True)]
    peers = {"torch_bf16": rotating(lambda x, w: torch.matmul(x, w.t()), pairs)}
    if activations == "fp8":
        calls = [(_scaled_mm(x, stack.data[0], K),) for x, stack in sets]
        peers["torch_scaled_mm"] = rotating(lambda call: call(), calls)
    params: dict[str, int | str] = {
        "format": format,
        "activations": activations,
        "tokens": M,
        "inputs": K,
        "outputs": N,
    }
    return Case(
        "linear",
        "linear",
        params,
        rotating(run, sets),
        read + 2 * M * N,
        2 * M * N * K,
        peers,
        len(sets),
        compute="fp8" if activations == "fp8" else "bf16",
        error=lambda: truth.linear_error(run(*sets[0]), *sets[0], format, activations),
    )


def _more(nbytes: int, device: torch.device) -> int:
    return sets_for(nbytes, device) - 1


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """The table's rows."""
    return (entry.case(device) for entry in table(quick))


def table(quick: bool = False) -> Iterator[Entry]:
    """One row in every format; more rows in the formats that serve."""
    few = ("int4-g128", "int8-channel")
    for format in few:
        for N, K in SHAPES[1:2] if quick else SHAPES:
            yield _entry(format, 1, K, N)
    N, K = SHAPES[1]
    for format in () if quick else ("int4", "int8", "fp8", "q4_k", "q6_k"):
        yield _entry(format, 1, K, N)
    for format in few[:1] if quick else (*few, "fp8", "q4_k"):
        for M in (16, 2048) if quick else (4, 16, 64, 256, 2048):
            yield _entry(format, M, K, N)


def _entry(format: str, M: int, K: int, N: int) -> Entry:
    make = functools.partial(case, format=format, tokens=M, inputs=K, outputs=N)
    return Entry("linear", f"{format}-T{M}-{K}x{N}", make)
