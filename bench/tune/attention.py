"""What ``tune`` does for attention: decode over paged caches and causal prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.cases.attention import D_MLA, PAGE, L, R, planned
from bench.cases.attention_size import Size
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.select import shipped_decode, shipped_prefill
from pykernels.gpu.plans.attention import DecodePlan, PrefillPlan
from pykernels.gpu.plans.attention_lines import OPS, AttentionShape
from pykernels.gpu.plans.tuned import write_tuned

from .attention_candidates import candidates
from .job import Calls, Kept

Plan = DecodePlan | PrefillPlan

SIZES = (
    Size("mla_decode", 1, 8192),
    Size("mla_decode", 1, 65536),
    Size("mla_decode", 8, 8192),
    Size("mla_decode", 8, 65536),
    Size("mla_decode", 8, 32768, format="fp8"),
    Size("mla_decode", 8, 32768, heads=16),
    Size("gqa_decode", 1, 32768, heads=32),
    Size("gqa_decode", 8, 32768, heads=32),
    Size("gqa_decode", 8, 32768, heads=64, kv_heads=4),
    Size("gqa_decode", 8, 32768, heads=32, format="fp8"),
    Size("gqa_decode", 8, 32768, heads=16, head_dim=256),
    Size("mla_prefill", 1, 2048, heads=32),
    Size("mla_prefill", 1, 8192, heads=32),
    Size("gqa_prefill", 1, 2048, heads=32),
    Size("gqa_prefill", 1, 8192, heads=32),
    Size("gqa_prefill", 1, 8192, heads=16, head_dim=256, kv_heads=4),
)
"""What is tuned unless other sizes are asked for."""


@dataclass(frozen=True)
class AttentionJob:
    """One line of the file: attention of one size, as the benchmark has it."""

    size: Size

    @property
    def op(self) -> str:
        return self.size.kind

    @property
    def params(self) -> dict[str, Any]:
        return {"op": self.op, **self.size.params}

    @property
    def shape(self) -> AttentionShape:
        """What a launch of it looks for."""
        size, decode = self.size, self.size.decode
        B, K, NH, page = size.batch, size.context, size.heads, PAGE if decode else 0
        if decode:  # the page table has room for whole pages, but no sequence is longer
            K = size.keys_read
        near = (B, size.queries, K)
        if self.op == "mla_decode":
            return AttentionShape(NH, 1, L, R, L, page, 0, *near)
        if self.op == "mla_prefill":
            return AttentionShape(NH, NH, D_MLA, R, D_MLA, page, 0, *near)
        D = size.head_dim
        return AttentionShape(NH, size.kv_heads, D, 0, D, page, size.window, *near)

    def shipped(self, device: torch.device) -> Plan:
        if self.size.decode:
            return shipped_decode(self.op, self.shape, self.size.format == "fp8", device)
        return shipped_prefill(self.shape, False, False, True, device)

    def candidates(self, capability: tuple[int, int]) -> list[Plan]:
        return list(candidates(self.size, capability))

    def kernel(self, plan: Plan) -> tuple[object, Plan]:
        """Batches, lengths and how many share them are run-time numbers."""
        if isinstance(plan, DecodePlan):
            plan = replace(plan, ctas_per_sm=1, min_blocks=1)
        shape = self.shape
        fixed = (shape.heads // shape.kv_heads, *shape[2:6], shape.window > 0, shape.queries > 1)
        return (self.op, self.size.format, *fixed, plan), plan

    def calls(self, device: torch.device, kept: Kept) -> Calls:
        kept.clear()
        return planned(self.size, device)

    def write(self, device_name: str, plan: Plan) -> Path:
        return write_tuned(device_name, self.op, self.size.format, plan, **self.shape._asdict())


def jobs(ops: set[str], formats: set[str], given: Sequence[str] = ()) -> Iterator[AttentionJob]:
    """The jobs of ``SIZES``, or for each op of the sizes ``given`` as "batch=8,context=4096".

    Raises:
        PykernelsError: a size is none, or of no format that is asked for.
    """
    sizes: list[Size] = list(SIZES)
    if given:
        sizes = [_size(op, text) for op in OPS if op in ops for text in given]
    for size in sizes:
        if size.kind in ops and size.format in formats:
            yield AttentionJob(size)


def _size(op: str, text: str) -> Size:
    from bench.cases.gpu_run import check_flags

    fields: dict[str, int | str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        fields[name] = int(value) if value.isdecimal() else value
    check_flags("attention", fields)
    if "kind" in fields:
        raise PykernelsError("the kind of a size is its op", "Give it as --op")
    if "keys" in fields:
        raise PykernelsError("a prefill is tuned with its keys in rows", "Leave keys out")
    size = Size(op, **fields)  # type: ignore[arg-type]
    if op.startswith("gqa") and size.heads % size.kv_heads:
        raise PykernelsError(
            f"{size.heads} heads on {size.kv_heads} KV heads", "Give a whole number a KV head"
        )
    return size
