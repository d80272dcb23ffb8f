"""A call of one layer's experts: its buffers, and the descriptor (``MOE_ARGS``) that points at
them.

``MoECall.bind`` writes where the calls to come find their inputs; what depends on values, the sort
by expert, is one compiled function (``take_call``), which a worker runs.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, types

from ...quant import PackedExperts
from ...quant.layout import K_BLOCK, N_BLOCK, ceil_to
from ..activations.row_layout import RowFormat, row_bytes
from ..intrin.sync import as_pointer
from ..jit import inlined
from .args import MOE_ARGS, moe_args_at
from .kernel import NO_GEMM, MoEKernel, tables_address
from .plan import MoEPlan, gemm_from_here, plan
from .sort import OK, sort_pairs

BAD_EXPERT = -1


@inlined
def take_call(args_address, ids, weights):
    """Sorts a bound call's routing by expert.

    Args:
        ids, weights: as in ``sort_pairs``.

    Returns:
        the number of active experts, or BAD_EXPERT or ``raised.RAISED``. Without an active expert
        there is no task, and y is set to zeros here.
    """
    args = moe_args_at(args_address)
    args.raised = 0
    if sort_pairs(args_address, ids, weights) != OK:
        return BAD_EXPERT
    if args.A == 0:
        for t in range(args.T):
            y = carray(as_pointer(args.y + t * args.y_stride), (args.H,), types.float32)
            for i in range(args.H):
                y[i] = 0
        return 0
    if args.h_done != 0:
        groups = args.A * ((args.i_blocks + args.i_group - 1) // args.i_group)
        done = carray(as_pointer(args.h_done), (groups,), types.int64)
        for i in range(groups):
            done[i] = 0
    return args.raised if args.raised != 0 else args.A


_AT = {name: index for index, name in enumerate(MOE_ARGS.names or ())}
"""Where each field of ``MOE_ARGS`` is among its words: 20 times as quick as numpy's own lookup."""


class MoEWorkspace:
    """Scratch for calls of one layer shape, grown when a call has more tokens than any before.

    Layers of one shape share a workspace: they run one after the other, though several threads may
    bind them.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = (0,) * 10
        self.buffers: dict[str, torch.Tensor] = {}
        self._scratch, self._growing = torch.empty(0, dtype=torch.uint8, device="cpu"), Lock()

    def scratch(self, workers: int, nbytes: int) -> torch.Tensor:
        """uint8 [workers * nbytes], 64-byte aligned; it only grows, and old ones stay valid."""
        with self._growing:
            scratch = self._scratch
            if scratch.numel() < workers * nbytes:
                raw = torch.empty(workers * nbytes + 64, dtype=torch.uint8, device="cpu")
                skip = -raw.data_ptr() % 64
                self._scratch = scratch = raw[skip : skip + workers * nbytes]
            return scratch

    def reserve(
        self,
        T: int,
        topk: int,
        E: int,
        H: int,
        I: int,  # noqa: E741
        gemm_from: int,
        h_format: RowFormat | None,
        h_format_gemm: RowFormat | None,
    ) -> dict[str, torch.Tensor]:
        """The buffers for a call of T tokens, H and I padded; not cleared between calls."""
        S, Hp = T * topk, H
        h_row = row_bytes(I, h_format)
        dense = min(E, S // gemm_from)  # experts that may take the GEMM
        groups = S // 16 + 2 * dense if dense else 0
        few, many = min(S, E * (gemm_from - 1)), S if dense else 0  # pairs of tiles, of the GEMM
        sizes: tuple[int, ...] = (
            T,
            S,
            E,
            Hp,
            few,
            h_row,
            many,
            row_bytes(I, h_format_gemm),
            groups * H * 16,
            groups * I * 16,
        )
        with self._growing:
            if any(need > have for need, have in zip(sizes, self._sizes, strict=True)):
                sizes = tuple(max(pair) for pair in zip(sizes, self._sizes, strict=True))
                T, S, E, Hp, few, h_row, many, h_gemm_row, x_tiles, h_tiles = sizes
                # Everything explicit: the caller may have changed torch's defaults.
                zeros = partial(torch.zeros, device="cpu")
                self.buffers = {
                    "h": zeros(few, h_row, dtype=torch.uint8),
                    "h_gemm": zeros(many, h_gemm_row, dtype=torch.uint8),
                    "h_rows": zeros(E, dtype=torch.int64),
                    "acc": zeros(T, Hp, dtype=torch.float32),
                    "pair_token": zeros(S, dtype=torch.int64),
                    "pair_weight": zeros(S, dtype=torch.float32),
                    "experts": zeros(E, dtype=torch.int64),
                    "starts": zeros(E + 1, dtype=torch.int64),
                    "cursor": zeros(E, dtype=torch.int64),
                    "x_tiles": zeros(x_tiles, dtype=torch.bfloat16),
                    "h_tiles": zeros(h_tiles, dtype=torch.bfloat16),
                    "groups": zeros(E, dtype=torch.int64),
                    "pieces": zeros(E, dtype=torch.int64),
                    "piece_active": zeros(S, dtype=torch.int64),
                    "piece_pair": zeros(S, dtype=torch.int64),
                }
                self._sizes = sizes  # last: an allocation may fail or be interrupted
            return self.buffers


class Tasks(NamedTuple):
    """How many tasks each stage of a call has.

    ``active``: its experts; ``down`` has ``down_chunks`` tasks for each.
    """

    active: int
    pack: int
    gate_up: int
    down_chunks: int


class MoECall:
    """One layer's descriptor: the addresses of its weights and, by ``bind``, of its inputs.

    Attributes:
        args: the ``MOE_ARGS`` record (numpy, one element); ``address`` is where it lies.
    """

    def __init__(
        self,
        experts: PackedExperts,
        kernel: MoEKernel,
        workspace: MoEWorkspace,
        workers: int = 1,
        moe_plan: MoEPlan | None = None,
        gemm_from: int | None = None,
        scratches: int | None = None,
    ) -> None:
        """``moe_plan`` is for every call; None plans each by its tokens, for ``workers`` threads.

        ``gemm_from`` is as in ``MoEPlan``; None for the later one of both stages'
        ``plan.gemm_from_here``.
        ``scratches``: tasks have worker numbers below it; None for ``workers``.
        """
        gate_up, down = kernel.gate_up, kernel.down
        fmt, down_fmt, shape = experts.fmt, experts.down_fmt, experts.shape
        assert (gate_up.fmt, down.fmt, kernel.spec) == (fmt.name, down_fmt.name, shape.spec)
        self._gemm_from = gemm_from or max(
            gemm_from_here(one.backend, one.fmt, one.activations) or NO_GEMM
            for one in (gate_up, down)
        )
        self.experts, self.kernel, self._workspace = experts, kernel, workspace
        self._workers, self._moe_plan = workers, moe_plan
        self.args = np.zeros(1, MOE_ARGS)
        self.address = int(self.args.ctypes.data)
        self._words = self.args.view(np.int64).data  # as a memoryview: numpy's scalars are slow
        self._scratch = workspace.scratch(scratches or workers, kernel.scratch_bytes)
        fields = {
            "H": shape.H,
            "E": shape.E,
            "gate_up": experts.gate_up.data_ptr(),
            "gate_up_stride": experts.gate_up.stride(0),
            "gate_up_scale": experts.gate_up_scale.data_ptr(),
            "gate_up_scale_stride": experts.gate_up_scale[0].nbytes,
            "gate_up_scale_block": fmt.scale_bytes(shape.H),
            "gate_up_block": fmt.block_bytes(shape.H),
            "gate_up_k": ceil_to(shape.H, fmt.k_block) // K_BLOCK,
            "gate_up_bias": experts.gate_up_bias.data_ptr(),
            "gate_up_bias_stride": experts.gate_up_bias[0].nbytes,
            "i_blocks": experts.gate_up.shape[1],
            "down": experts.down.data_ptr(),
            "down_stride": experts.down.stride(0),
            "down_scale": experts.down_scale.data_ptr(),
            "down_scale_stride": experts.down_scale[0].nbytes,
            "down_scale_block": down_fmt.scale_bytes(shape.I),
            "down_block": down_fmt.block_bytes(shape.I),
            "down_k": ceil_to(shape.I, down_fmt.k_block) // K_BLOCK,
            "down_bias": experts.down_bias.data_ptr(),
            "down_bias_stride": experts.down_bias[0].nbytes,
            "tables": tables_address(),
            "gate_up_tiles": gate_up.tiles,
            "down_tiles": down.tiles,
            "run_pack": kernel.stages.pack.address,
            "run_gate_up": kernel.stages.gate_up.address,
            "run_down": kernel.stages.down.address,
            "gate_up_gemm": gate_up.gemm,
            "down_gemm": down.gemm,
            "quantize_h": down.quantize_row,
            "quantize_h_gemm": down.gemm_quantize_row,
            "int8": gate_up.int8,
            "interleave_x": gate_up.interleave_a,
            "interleave_h": down.interleave_a,
            "tile_steps": 2 if gate_up.int8 else 4,
            "scratch": self._scratch.data_ptr(),
            "scratch_stride": kernel.scratch_bytes,
        }
        for name, value in fields.items():
            self.args[name] = value

    def bind(self, T: int, topk: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
        """Points every call to come, of up to T tokens, at its inputs; it is planned as one of T.

        Args:
            topk: experts of a token.
            x: address of T rows (``activations.row_layout``) in the form of ``kernel``.
            y: address of float32 [T, H]; strides are in bytes.
        """
        words = self._words
        self._plan(T)
        self._reserve(T, topk)
        for name, value in (
            ("T", T),
            ("topk", topk),
            ("x", x),
            ("x_stride", x_stride),
            ("y", y),
            ("y_stride", y_stride),
        ):
            words[_AT[name]] = value

    @property
    def active(self) -> int:
        """Experts of the call that was taken last."""
        return self._words[_AT["A"]]

    @property
    def tasks(self) -> Tasks:
        """Tasks of the call that was taken last."""
        word = {name: self._words[_AT[name]] for name in ("A", "P", "i_chunks", "h_chunks")}
        active = word["A"]
        return Tasks(active, word["P"], active * word["i_chunks"], word["h_chunks"])

    @property
    def down_chunks(self) -> int:
        """Chunks of down of a call that has a token."""
        return self._words[_AT["h_chunks"]]

    def _plan(self, T: int) -> None:
        """Writes the plan for T tokens."""
        moe_plan = self._moe_plan or plan(
            self.experts.shape, self.experts.fmt, self._workers, T, self._gemm_from
        )
        args = self.args[0]
        whole = max(1, self.kernel.down.row_k // N_BLOCK)  # blocks that are quantized together
        i_blocks, i_chunk = int(args["i_blocks"]), ceil_to(moe_plan.i_chunk, whole)
        part = next((n for n in range(moe_plan.i_chunk, whole) if whole % n == 0), whole)
        args["h_done"] = 0
        if part < min(whole, i_blocks):  # many threads: tasks of a part of what they quantize
            i_chunk = part
            self._h_done = np.zeros(self.experts.shape.E * -(-i_blocks // whole), np.int64)
            args["h_done"] = self._h_done.ctypes.data
        args["i_group"], args["i_chunk"] = whole, i_chunk
        args["i_chunks"] = -(-i_blocks // i_chunk)
        self._h_cuts = np.array(moe_plan.down_cuts(self.experts.down.shape[1]), np.int64)
        args["h_cuts"], args["h_chunks"] = self._h_cuts.ctypes.data, len(self._h_cuts) - 1
        args["down_splits"] = moe_plan.down_splits
        args["gemm_from"] = moe_plan.gemm_from if self.kernel.has_gemm else NO_GEMM

    def _reserve(self, T: int, topk: int) -> None:
        """Points the descriptor at scratch of the workspace."""
        E, words = self.experts.shape.E, self._words
        H, I = (K_BLOCK * words[_AT[name]] for name in ("gate_up_k", "down_k"))  # noqa: E741
        hows = self.kernel.down.row_formats
        # Kept: the workspace forgets its buffers when it grows.
        self._buffers = self._workspace.reserve(T, topk, E, H, I, words[_AT["gemm_from"]], *hows)
        for name, buffer in self._buffers.items():
            self.args[name] = buffer.data_ptr()
        for name in ("h", "h_gemm"):
            buffer = self._buffers[name]
            self.args[f"{name}_stride"] = buffer.stride(0) * buffer.element_size()
