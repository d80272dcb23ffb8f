"""Steps of attention over a made-up cache: run serially, and by the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pykernels.cpu.attention.args import ATTENTION, PAGE
from pykernels.cpu.attention.kernel import AttentionKernel
from pykernels.ref.attention import attend
from pykernels.ref.kv_write import quantize_rows
from pykernels.testing import poisoned


def bits(value: float) -> int:
    """A float32's, as jobs hold it."""
    return int(np.float32(value).view(np.int32))


@dataclass
class Step:
    """``sequences``: of each its tokens of this step, and its keys with them.

    The cache is [pages, PAGE, KVH, D_K + D_V], of MLA [pages, PAGE, 1, D_K], whose first D_V
    numbers are the values. Pages lie in random order; whatever is not written is NaN. ``codes``: of
    a key that are E4M3, as its values are then.
    """

    sequences: Sequence[tuple[int, int]]
    NH: int
    KVH: int
    D_K: int
    D_V: int
    mla: bool = False
    window: int = 0
    sinks: bool = False
    scale: float = 0.1
    codes: int = 0
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(len(self.sequences))
        T, S = sum(tokens for tokens, _ in self.sequences), len(self.sequences)
        self.q = torch.randn(T, self.NH, self.D_K, generator=g)
        used = [-(-keys // PAGE) for _, keys in self.sequences]
        order = torch.randperm(sum(used) + 1, generator=g).tolist()
        self.table = torch.full((S, max(used) + 1), 1 << 40)
        both = self.D_K if self.mla else self.D_K + self.D_V
        cache = poisoned(len(order), PAGE, self.KVH, both, dtype=torch.bfloat16)
        self.k = cache[..., : self.D_K]
        self.v = cache[..., : self.D_V] if self.mla else cache[..., self.D_K :]
        self.sequence = torch.empty(T, dtype=torch.int64)
        self.positions = torch.empty(T, dtype=torch.int64)
        t = 0
        for s, (tokens, keys) in enumerate(self.sequences):
            for j in range(used[s]):
                self.table[s, j] = page = order.pop()
                n = min(PAGE, keys - PAGE * j)
                cache[page, :n] = torch.randn(n, self.KVH, both, generator=g).bfloat16()
            self.sequence[t : t + tokens] = s
            self.positions[t : t + tokens] = torch.arange(keys - tokens, keys)
            t += tokens
        self.k_scale = self.v_scale = self.rope = torch.empty(0)
        if self.codes:
            self.rope = self.k[..., self.codes :].contiguous()
            codes, self.k_scale = quantize_rows(self.k[..., : self.codes])
            self.k = self.v = codes.view(torch.uint8)
            self.v_scale = self.k_scale
            if not self.mla:
                codes, self.v_scale = quantize_rows(cache[..., self.D_K :])
                self.v = codes.view(torch.uint8)
        self.sink = torch.randn(self.NH, generator=g) * 2 if self.sinks else None

    def truth(self) -> torch.Tensor:
        """float64 [T, NH, D_V]."""
        out, t = [], 0
        for s, (tokens, keys) in enumerate(self.sequences):
            pages = self.table[s, : -(-keys // PAGE)]
            k, v = self._values(pages, keys)
            q, sinks = self.q[t : t + tokens].double(), self.sink
            window = self.window or None
            out.append(attend(q, k, v, scale=self.scale, window=window, sinks=sinks))
            t += tokens
        return torch.cat(out)

    def _values(self, pages: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [count, KVH, D_K] and [count, KVH, D_V]."""

        def rows(x: torch.Tensor) -> torch.Tensor:
            x = x[pages].flatten(0, 1)[:count]
            return (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).double()

        k, v = rows(self.k), rows(self.v)
        if self.codes:
            k, v = k * rows(self.k_scale)[..., None], v * rows(self.v_scale)[..., None]
            k = torch.cat([k, rows(self.rope)], -1)
        return k, v

    def args(self, attention: AttentionKernel, out: torch.Tensor) -> tuple[np.ndarray, list[Any]]:
        """The record, and what it points to."""
        T, S = self.q.shape[0], len(self.sequences)
        keys = sum(keys for _, keys in self.sequences)
        need = attention.workspace(self.NH, self.KVH, T, S, keys)
        sizes = torch.tensor([T, S])
        memory = {
            "items": need.items_bytes,
            "combines": need.combines_bytes,
            "partial": need.partial_bytes,
            "scratch": attention.scratch_bytes,
        }
        held: list[Any] = [sizes]
        args = np.zeros(1, ATTENTION)
        for name, nbytes in memory.items():
            held.append(torch.full((nbytes + 64,), 255, dtype=torch.uint8))
            args[name] = (held[-1].data_ptr() + 63) // 64 * 64
        for name in ("sequence", "positions", "q", "k", "v", "k_scale", "v_scale", "rope"):
            args[name] = getattr(self, name).data_ptr()
        args["sizes"], args["page_table"] = sizes.data_ptr(), self.table.data_ptr()
        args["page_table_stride"] = self.table.stride(0)
        args["q_stride"], args["out_stride"] = 4 * self.q.stride(0), 4 * out.stride(0)
        size = self.k.element_size()
        args["page_bytes"], args["token_bytes"] = size * self.k.stride(0), size * self.k.stride(1)
        args["k_head_bytes"], args["v_head_bytes"] = (
            size * self.k.stride(2),
            size * self.v.stride(2),
        )
        args["NH"], args["KVH"], args["scale"] = self.NH, self.KVH, bits(self.scale)
        args["tokens_to"] = 1 << 40
        args["window"], args["out"] = self.window, out.data_ptr()
        args["sinks"] = 0 if self.sink is None else self.sink.data_ptr()
        args["items_capacity"] = need.items_capacity
        args["combines_capacity"] = need.combines_capacity
        args["partial_bytes"] = need.partial_bytes
        return args, held

    def run(self, attention: AttentionKernel, backwards: bool = False) -> tuple[torch.Tensor, int]:
        """(float32 [T, NH, D_V], tasks of the second op)."""
        out = poisoned(self.q.shape[0], self.NH, self.D_V)
        args, _held = self.args(attention, out)
        address, tasks = args.ctypes.data, 0
        for setup, run in (
            (attention.setup, attention.run),
            (attention.combine_setup, attention.combine),
        ):
            tasks = setup.ctypes(address, -1, 0)
            assert tasks >= 0
            for i in range(tasks)[:: -1 if backwards else 1]:
                assert run.ctypes(address, i, 0) == 0
        return out, tasks
