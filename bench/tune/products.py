"""What ``tune`` does for matrix products: DeepSeek-V3's experts and linears of its sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.cases.moe import INTER, TOPK, E, H, route
from bench.cases.weights import random_experts, random_stack
from bench.harness.timing.case import sets_for
from pykernels.gpu.common.launch import H200_SMS
from pykernels.gpu.gemm.hopper.dequant import EXPERT_KINDS
from pykernels.gpu.gemm.hopper.dequant import KINDS as DEQUANT_KINDS
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.select import kernel_of, most_skinny_rows
from pykernels.gpu.gemm.weights import empty_for_gpu, kind_of
from pykernels.gpu.moe.fused_moe import GpuExperts, down, gate_up, sort_pairs
from pykernels.gpu.plans.gemm import DequantPlan, GemmPlan, LinearPlan
from pykernels.gpu.plans.tuned import EXPERTS_PLANS, write_tuned
from pykernels.quant import get_format

from .job import Calls, Kept
from .products_candidates import candidates

OPS = ("gate_up", "down", "linear")
FORMATS = ("bf16", "fp8", "int4-g128", "int8-channel", "q4_k")
LAYER = ("gate_up", "down", *EXPERTS_PLANS)


@dataclass(frozen=True)
class ProductJob:
    """One line of the file: an operation on matrices [N, K] of a format at so many rows each."""

    op: str
    format: str
    activations: str
    rows: int
    N: int = INTER
    K: int = H

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def path(self) -> str:
        if self.activations == "fp8":
            return "fp8"
        return kind_of(get_format(self.format))

    @property
    def tokens(self) -> int:
        """T of a layer whose experts get ``rows`` rows each."""
        return max(1, self.rows * E // TOPK)

    def candidates(self, capability: tuple[int, int]) -> list[LinearPlan]:
        return list(candidates(self.op, self.path, self.rows))

    def shipped(self, device: torch.device) -> None:
        """It depends on more than the job says; candidates are around it."""
        return

    def kernel(self, plan: LinearPlan) -> tuple[object, LinearPlan]:
        """split_k and sizes are run-time numbers."""
        if isinstance(plan, GemmPlan):
            plan = replace(plan, split_k=1)
        elif isinstance(plan, DequantPlan):
            plan = replace(plan, split_k=min(plan.split_k, 2))  # parts are float32
        return (self.op, self.format, self.activations, self.rows == 1, plan), plan

    def calls(self, device: torch.device, kept: Kept) -> Calls:
        """Experts are kept for the next job of their format."""
        if self.op in LAYER:
            if self.format not in kept:
                kept.clear()  # before the next ones are made
                format = get_format(self.format)
                kept[self.format] = (
                    GpuExperts.empty(format, E, H, INTER, device)
                    if device.type == "meta"
                    else random_experts(self.format, E, H, INTER, device)
                )
            return self._layer(device, kept[self.format])
        kept.clear()
        stacks = [random_stack(self.format, 1, self.N, self.K, device)]
        if device.type != "meta":  # together larger than L2
            more = sets_for(stacks[0].nbytes, device) - 1
            stacks += [random_stack(self.format, 1, self.N, self.K, device) for _ in range(more)]
        x = torch.randn(self.rows, self.K, device=device).bfloat16()
        turn = itertools.cycle(stacks)
        return lambda plan: linear(x, next(turn), plan=plan), len(stacks)

    def _layer(self, device: torch.device, experts: GpuExperts) -> Calls:
        T = self.tokens
        x = torch.randn(T, H, device=device).bfloat16()
        ids = torch.empty(T, TOPK, dtype=torch.int64, device=device)
        if device.type != "meta":
            ids = route(T, E, TOPK, "balanced", device)
        order = sort_pairs(ids, E)
        how = self.activations
        if self.op.endswith("gate_up"):
            return lambda plan: gate_up(x, experts, order, activations=how, plan=plan), 1
        h = torch.randn(T * TOPK, INTER, device=device).bfloat16()
        return lambda plan: down(h, experts, order, activations=how, plan=plan), 1

    def write(self, device_name: str, plan: LinearPlan) -> Path:
        sizes = {"rows": self.rows, "N": self.N, "K": self.K}
        return write_tuned(device_name, self.op, self.path, plan, **sizes)


def jobs(ops: set[str], formats: set[str]) -> Iterator[ProductJob]:
    """DeepSeek-V3's layer and linears, at rows from one to many."""
    layer = [("bf16", "bf16", r) for r in (1, 64, 128, 512)]
    layer += [("fp8", "fp8", r) for r in (64, 128, 512)]
    layer += [("int4-g128", "bf16", r) for r in (1, 64, 256)] + [("q4_k", "bf16", 1)]
    for format, activations, rows in layer:
        if format in formats:
            for op, N, K in (("gate_up", INTER, H), ("down", H, INTER)):
                if op in ops:
                    if activations == "bf16" and rows <= _skinny_rows(format):
                        op = next(name for name in EXPERTS_PLANS if name.endswith(op))
                    yield ProductJob(op, format, activations, rows, N, K)
    linears = [(f, M) for f in ("int4-g128", "int8-channel") for M in (1, 16, 64, 256, 2048)]
    for format, M in [*linears, ("bf16", 64), ("fp8", 1), ("q4_k", 1), ("q4_k", 4), ("q4_k", 16)]:
        for N, K in ((7168, 7168), (18432, 7168)):
            if "linear" in ops and format in formats:
                op = _linear_op(kind_of(get_format(format)), M, N, K)
                yield ProductJob(op, format, "bf16", M, N, K)


def _skinny_rows(format: str) -> int:
    """Most rows an expert for ``skinny_experts`` on Hopper."""
    stack = empty_for_gpu(get_format(format), 1, INTER, H, torch.device("meta"))
    if stack.kind == "bf16":
        return 0
    return most_skinny_rows(stack.kind, stack.group, stack.kind in EXPERT_KINDS)


def _linear_op(kind: str, M: int, N: int, K: int) -> str:
    """Which kernel multiplies a linear's rows on Hopper."""
    return kernel_of(kind, M, N, K, H200_SMS, (9, 0), kind in DEQUANT_KINDS)
