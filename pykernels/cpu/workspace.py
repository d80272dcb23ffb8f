"""Buffers of a call, and the descriptor that points at them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import PykernelsError
from ..quant import PackedExperts
from ..quant.layout import K_BLOCK, N_BLOCK, ceil_to
from .decode import packed_bytes
from .job import JOB
from .moe import NEVER, MoEKernel, tables_address
from .plan import GEMM_FROM, MoEPlan, plan
from .routing import BAD_EXPERT, copy_rows, sort_slots
from .rows import row_bytes


class Workspace:
    """Scratch for calls of one layer shape, grown when a call has more tokens than any before.

    Layers of one shape share a workspace: they run one after the other.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = (0,) * 7
        self._buffers: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch(self, workers: int, nbytes: int) -> torch.Tensor:
        """uint8 [workers * nbytes], 64-byte aligned; it only grows, and old ones stay valid."""
        if self._scratch.numel() < workers * nbytes:
            raw = torch.empty(workers * nbytes + 64, dtype=torch.uint8)
            skip = -raw.data_ptr() % 64
            self._scratch = raw[skip : skip + workers * nbytes]
        return self._scratch

    def reserve(
        self,
        T: int,
        topk: int,
        E: int,
        H: int,
        I: int,  # noqa: E741
        gemm_from: int,
    ) -> dict[str, torch.Tensor]:
        """The buffers for a call of T tokens, H and I padded; not cleared between calls."""
        S, Hp, Ip = T * topk, H, I
        dense = min(E, S // gemm_from)  # experts that may take the GEMM
        groups = S // 16 + 2 * dense if dense else 0
        sizes: tuple[int, ...] = (T, S, E, Hp, Ip, groups * Hp * 16, groups * Ip * 16)
        if any(need > have for need, have in zip(sizes, self._sizes, strict=True)):
            sizes = tuple(max(pair) for pair in zip(sizes, self._sizes, strict=True))
            self._sizes = sizes
            T, S, E, Hp, Ip, x_tiles, h_tiles = sizes
            self._buffers = {
                "x": torch.zeros(T, row_bytes(Hp), dtype=torch.uint8),
                "h": torch.zeros(S, row_bytes(Ip), dtype=torch.uint8),
                "acc": torch.zeros(T, Hp),
                "slot_token": torch.zeros(S, dtype=torch.int64),
                "slot_weight": torch.zeros(S),
                "experts": torch.zeros(E, dtype=torch.int64),
                "starts": torch.zeros(E + 1, dtype=torch.int64),
                "cursor": torch.zeros(E, dtype=torch.int64),
                "x_tiles": torch.zeros(x_tiles, dtype=torch.bfloat16),
                "h_tiles": torch.zeros(h_tiles, dtype=torch.bfloat16),
                "groups": torch.zeros(E, dtype=torch.int64),
                "pieces": torch.zeros(E, dtype=torch.int64),
                "piece_active": torch.zeros(S, dtype=torch.int64),
                "piece_slot": torch.zeros(S, dtype=torch.int64),
            }
        return self._buffers


@dataclass(frozen=True)
class Prepared:
    """How many tasks each stage of a prepared call has."""

    active: int
    pack_tasks: int
    i_chunks: int
    down_chunks: int

    @property
    def gate_up_tasks(self) -> int:
        return self.active * self.i_chunks


class MoECall:
    """One layer's descriptor: its weights' addresses once, a call's inputs at every ``prepare``.

    Attributes:
        job: the ``JOB`` record (numpy, one element); ``address`` is where it lies.
    """

    def __init__(
        self,
        experts: PackedExperts,
        kernel: MoEKernel,
        workspace: Workspace,
        workers: int = 1,
        cut: MoEPlan | None = None,
        gemm_from: int = GEMM_FROM,
    ) -> None:
        """``cut`` is for every call; None plans each by its tokens, for ``workers`` threads."""
        self._gemm_from = gemm_from
        self.experts, self.kernel, self._workspace = experts, kernel, workspace
        self._workers, self._cut = workers, cut
        fmt, shape = experts.fmt, experts.shape
        i_blocks, h_blocks = experts.gate_up.shape[1], experts.down.shape[1]
        self.job = np.zeros(1, JOB)
        self.address = int(self.job.ctypes.data)
        self._buffers: dict[str, torch.Tensor] = {}
        self._scratch = workspace.scratch(workers, kernel.scratch_bytes)
        fields = {
            "H": shape.H,
            "gate_up": experts.gate_up.data_ptr(),
            "gate_up_stride": experts.gate_up.stride(0),
            "gate_up_scale": experts.gate_up_scale.data_ptr(),
            "gate_up_scale_stride": experts.gate_up_scale[0].nbytes,
            "gate_up_scale_block": fmt.scale_bytes(shape.H),
            "gate_up_block": fmt.block_bytes(shape.H),
            "gate_up_k": ceil_to(shape.H, fmt.k_block) // K_BLOCK,
            "i_blocks": i_blocks,
            "down": experts.down.data_ptr(),
            "down_stride": experts.down.stride(0),
            "down_scale": experts.down_scale.data_ptr(),
            "down_scale_stride": experts.down_scale[0].nbytes,
            "down_scale_block": fmt.scale_bytes(shape.I),
            "down_block": fmt.block_bytes(shape.I),
            "down_k": ceil_to(shape.I, fmt.k_block) // K_BLOCK,
            "h_blocks": h_blocks,
            "tables": tables_address(),
            "tiles": kernel.tiles,
            "gemm": kernel.gemm,
            "annotate": kernel.annotate,
            "slab_bytes": packed_bytes(fmt.name),
            "operand": 2 if kernel.int8 else 0,
            "tile_steps": 2 if kernel.int8 else 4,
            "scratch": self._scratch.data_ptr(),
            "scratch_stride": kernel.scratch_bytes,
        }
        for name, value in fields.items():
            self.job[name] = value

    def prepare(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> Prepared:
        """Takes a call's inputs into the descriptor.

        Args:
            x: bf16 or float32 [T, H] on the CPU, rows contiguous.
            ids: int64 [T, topk] expert numbers.
            weights: [T, topk], taken as float32.
            y: bf16 or float32 [T, H], what ``down`` writes; the caller keeps it alive.

        Raises:
            PykernelsError: shapes, dtypes or expert numbers that do not fit.
        """
        T, topk = self._check(x, ids, weights)
        ids = ids.contiguous()
        weights = weights.float().contiguous()
        job, E = self.job[0], self.experts.shape.E
        H, I = K_BLOCK * int(job["gate_up_k"]), K_BLOCK * int(job["down_k"])  # noqa: E741
        gemm_from = self._plan(T)
        self._bind(self._workspace.reserve(T, topk, E, H, I, gemm_from))
        job["T"], job["y"], job["y_stride"] = T, y.data_ptr(), y.stride(0) * y.element_size()
        job["y_bf16"] = y.dtype == torch.bfloat16
        if x.stride(1) != 1:
            x = x.contiguous()
        copy_rows(
            self.address, x.data_ptr(), x.stride(0) * x.element_size(), x.dtype == torch.bfloat16
        )
        cursor = self._buffers["cursor"].data_ptr()
        status = sort_slots(self.address, E, topk, ids.data_ptr(), weights.data_ptr(), cursor)
        if status == BAD_EXPERT:
            raise PykernelsError(
                f"the routing names expert {int(ids.min())} .. {int(ids.max())} in a layer of {E}",
                "Expert ids must be 0 to E - 1",
            )
        chunks = int(job["h_chunks"]) if job["A"] else 0
        return Prepared(int(job["A"]), int(job["P"]), int(job["i_chunks"]), chunks)

    def _plan(self, T: int) -> int:
        """Writes the cut for T tokens; returns from how many an expert takes the GEMM."""
        cut = self._cut or plan(
            self.experts.shape, self.experts.fmt, self._workers, T, self._gemm_from
        )
        job = self.job[0]
        whole = max(1, self.kernel.annotate_k // N_BLOCK)  # blocks that a task must own together
        for stage, chunk in (("i", ceil_to(cut.i_chunk, whole)), ("h", cut.h_chunk)):
            job[f"{stage}_chunk"] = chunk
            job[f"{stage}_chunks"] = -(-int(job[f"{stage}_blocks"]) // chunk)
        job["gemm_from"] = cut.gemm_from if self.kernel.has_gemm else NEVER
        return int(job["gemm_from"])

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[int, int]:
        H = self.experts.shape.H
        if x.ndim != 2 or x.shape[1] != H or x.dtype not in (torch.bfloat16, torch.float32):
            raise PykernelsError(
                f"x is {x.dtype} {tuple(x.shape)}", f"Give bfloat16 or float32 of shape [T, {H}]"
            )
        if ids.dtype != torch.int64 or ids.shape != weights.shape or ids.shape[:1] != x.shape[:1]:
            raise PykernelsError(
                f"ids are {ids.dtype} {tuple(ids.shape)}, weights {tuple(weights.shape)},"
                f" for {x.shape[0]} tokens",
                "Give int64 ids and weights of shape [T, topk]",
            )
        if x.device.type != "cpu" or ids.device.type != "cpu" or weights.device.type != "cpu":
            raise PykernelsError(
                "an input of the CPU experts is on a GPU", "Copy it with .cpu() first"
            )
        return ids.shape[0], ids.shape[1]

    def _bind(self, buffers: dict[str, torch.Tensor]) -> None:
        """Points the descriptor at the workspace, again whenever that has grown."""
        if buffers is self._buffers:
            return
        self._buffers = buffers
        for name in buffers.keys() - {"cursor"}:
            self.job[name] = buffers[name].data_ptr()
        for name in ("x", "h", "acc"):
            self.job[f"{name}_stride"] = buffers[name].stride(0) * buffers[name].element_size()
