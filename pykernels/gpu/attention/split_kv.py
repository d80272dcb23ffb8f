"""The combining kernel of split-KV (FlashDecoding): splits' results weighed by log-sum-exps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.launch import early_launch, launches_early
from .online_softmax import count_splits, load_lengths, with_sink

_VALUES = 8192
"""A CTA loads so many at once: 64 a thread."""


@triton.jit(do_not_specialize=["B", "total_splits"])  # a batch's size compiles nothing new
def _combine(
    partial,
    lse,
    out,
    sink_ptr,
    length_ptr,
    B,
    R,
    total_splits,
    S,
    window,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    BATCH: tl.constexpr,
    WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)  # of B * R
    d = tl.program_id(1) * D_BLOCK + tl.arange(0, D_BLOCK)
    n = tl.arange(0, BLOCK)
    i, lengths = load_lengths(length_ptr, B, BATCH)
    num_splits, start = count_splits(i, lengths, B, total_splits, S, window, KEYS, WINDOW)
    mine = i == row // R
    first = tl.sum(tl.where(mine, start, 0), 0)
    behind = first + tl.sum(tl.where(mine, num_splits, 0), 0)
    if EARLY:
        gdc_wait()  # until the splits are done
        gdc_launch_dependents()
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([D_BLOCK], tl.float32)
    for begin in range(first, behind, BLOCK):
        inside = begin + n < behind
        at = (begin + n).to(tl.int64) * R + row % R
        z = tl.load(lse + at, mask=inside, other=float("-inf"))
        # Both loads are on their way before anything waits for the first.
        mask = inside[:, None] & (d < D)[None, :]
        x = tl.load(partial + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(z, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.exp2(z - base)  # [BLOCK]
        alpha = tl.exp2(m_i - base)
        # An empty split wrote no values. It is left out here, not in the load, which would wait.
        x = tl.where((z > float("-inf"))[:, None], x * w[:, None], 0.0)
        acc = acc * alpha + tl.sum(x, 0)
        l_i = l_i * alpha + tl.sum(w, 0)
        m_i = m_new
    if sink_ptr is not None:
        l_i = with_sink(tl.load(sink_ptr + row % (R // S)), m_i, l_i)  # R is S tokens x heads
    y = acc / tl.where(l_i == 0, 1.0, l_i)
    tl.store(out + row.to(tl.int64) * D + d, y.to(out.dtype.element_ty), mask=d < D)


class Partials:
    """Scratch of one call: normalised partial results and their log-sum-exps, base 2.

    Attributes:
        split: whether there are more splits than sequences.
        values: float32 [total_splits, R, D], or the result itself, bf16 [B, R, D], if not
            ``split``.
        lse: float32 [total_splits, R].
        sinks: of each head, or None; the decode kernel's business if not ``split``.
        block: splits that the combining kernel loads at a time.
        batch: power of two that holds B, for the kernels' vectors of sequences; at least 32, so
            that one compilation serves all small batches.
        early: whether kernels are launched while the one before still runs, and wait for it by
            themselves (``launches_early``): their CTAs are resident when it ends.
        launch: what every launch is given for that.
    """

    def __init__(
        self, out: torch.Tensor, total_splits: int, sinks: torch.Tensor | None = None
    ) -> None:
        """out: [B, R, D], contiguous; it is what ``combine`` fills."""
        B, self.sinks = out.shape[0], sinks
        self.out, self.total_splits, self.split = out, total_splits, total_splits > B
        self.batch = max(32, triton.next_power_of_2(B))
        self.early = launches_early(out.device)
        self.launch = early_launch(self.early)
        # Most sequences' splits in one go. Five sizes at most are compiled.
        self.block = min(128, max(8, triton.next_power_of_2(total_splits // max(1, B))))
        self.values, self.lse = out, torch.empty(1, dtype=torch.float32, device=out.device)
        if self.split:
            self._allocate()

    def _allocate(self) -> None:
        (_, R, D), device = self.out.shape, self.out.device
        self.lse = torch.empty(self.total_splits, R, dtype=torch.float32, device=device)
        self.values = torch.empty(self.total_splits, R, D, dtype=torch.float32, device=device)

    def combine(self, lengths: torch.Tensor, S: int, window: int | None, keys: int) -> None:
        """``out`` from the partial results; nothing to do if there is one split a sequence.

        Args:
            lengths, S, window, keys: as the decode kernel had them.
        """
        if self.split:
            self._combine(lengths, S, window, keys)

    def _combine(self, lengths: torch.Tensor, S: int, window: int | None, keys: int) -> None:
        B, R, D = self.out.shape
        columns = min(triton.next_power_of_2(D), max(32, _VALUES // self.block))
        _combine[(B * R, triton.cdiv(D, columns))](
            self.values,
            self.lse,
            self.out,
            self.sinks,
            lengths,
            B,
            R,
            self.total_splits,
            S,
            window or 0,
            D=D,
            D_BLOCK=columns,
            BLOCK=self.block,
            KEYS=keys,
            BATCH=self.batch,
            WINDOW=window is not None,
            EARLY=self.early,
            num_warps=4,
            **self.launch,
        )
