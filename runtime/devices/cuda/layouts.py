"""What lies on a GPU takes how many bytes: for plans, which ask no GPU and need no Triton."""

from __future__ import annotations

from pykernels.gpu.limits import (
    DELTA_CHUNK,
    RANKED_EXPERTS,
    SUM_BLOCK,
    SUM_MEMBERS,
    SUM_PROGRAMS,
    UNPACK_SCRATCH,
)
from pykernels.gpu.moe.tiles.staging import gatherable, supports
from pykernels.quant import get_format

from ...planning.gpu.machine import Machine
from ...program import Program
from ...program.analysis import experts_per_token
from ...program.node import Node
from ...program.weight_spec import WeightSpec
from ...program.weights import WeightStore
from ..gpus import HEADROOM, Gpus, free_bytes, interpreted
from .link import link_rate
from .memory.buffers import EXPANDED_BYTES, dtypes, planned
from .memory.experts import staging_bytes
from .memory.weights import expert_format, gpu_bytes, layout_bytes, resident_bytes
from .step.channels import received_bytes
from .step.peers import Peers

_UNPACKED_KEYS = 2 << 30  # ``worth_unpacking``'s most


class CudaLayouts:
    """See ``planning.gpu.machine.GpuLayouts``."""

    def weight_bytes(self, spec: WeightSpec) -> int:
        return gpu_bytes(spec)

    def crossing_bytes(self, program: Program, node: Node, port: str) -> int:
        return layout_bytes(program, node, port, dtypes(program))

    def resident_bytes(self, spec: WeightSpec) -> int:
        return resident_bytes(spec)

    def filling_bytes(self, spec: WeightSpec) -> int:
        return staging_bytes(spec)

    def step_bytes(self, part: Program) -> int:
        temporary = max((_temporary(part, node) for node in part.nodes), default=0)
        return planned(part, dtypes(part)).nbytes + received_bytes(part) + temporary

    def why_not_streamed(self, spec: WeightSpec) -> str | None:
        fmt, down, (_, H, I) = get_format(spec.fmt), get_format(spec.down_fmt), spec.shape  # noqa: E741
        return supports(fmt, down, H, I, expert_format(spec)) or None

    def gathers(self, spec: WeightSpec) -> bool:
        formats = get_format(spec.fmt), get_format(spec.down_fmt)
        few = spec.shape[0] <= RANKED_EXPERTS
        return few and spec.moe is not None and gatherable(spec.moe, *formats)


def machine_of(gpus: Gpus, store: WeightStore, gpu_gib: float | None = None) -> Machine:
    """These GPUs, as much of their memory as is free now.

    Args:
        store: of the model that is planned; what it has made on a GPU already takes no more.
        gpu_gib: ``ExecutionConfig.gpu_gib``.
    """
    free = {name: nbytes - HEADROOM for name, nbytes in free_bytes(gpus, gpu_gib).items()}
    return Machine(
        free,
        CudaLayouts(),
        not interpreted(gpus),
        lambda spec, gpu: store.is_made(spec, gpus[gpu]),
        SUM_PROGRAMS * SUM_BLOCK if len(gpus) <= SUM_MEMBERS and Peers.of(gpus).atomics else 0,
        lambda: {} if interpreted(gpus) else {n: link_rate(gpu) for n, gpu in gpus.items()},
        {} if gpu_gib is None else dict.fromkeys(gpus, round(gpu_gib * 2**30)),
    )


def _temporary(program: Program, node: Node) -> int:
    T = program.sizes["T"]
    if node.op == "moe_ffn":  # rows of pairs: sorted, permuted, within experts, behind them
        _, H, inner = program.weight(node, "experts").shape
        rows = program.shape(node.inputs["x"])[0]  # where ranks share tokens, those of all
        each = experts_per_token(program, node.inputs["ids"]) if "ids" in node.inputs else 1
        return 2 * rows * each * (3 * H + 2 * inner) + UNPACK_SCRATCH
    if node.op == "gated_delta_rule" and node.attr("longest") != 1:  # W, U, G, states of chunks
        HV, DK, DV = program.shape(node.outputs["delta"])[1:]
        chunks = min(T, program.sizes["S"] + T // DELTA_CHUNK)
        return HV * (2 * T * (DK + DV) + 2 * 4 * T + 2 * chunks * DK * DV)
    if node.op == "attention_expanded":
        return EXPANDED_BYTES
    if node.op == "attention" and "k_scale" in node.inputs and "chunk_table" in node.inputs:
        table, k = program.shape(node.inputs["chunk_table"]), program.shape(node.inputs["k"])
        unpacked = 4 * table[0] * table[1] * k[1] * k[2] * k[3]
        return unpacked if unpacked <= _UNPACKED_KEYS else 0
    return 0
