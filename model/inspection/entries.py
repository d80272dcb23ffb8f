"""The modules of a model that hold weights, a row each: class, device, format, sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import supports_format
from pykernels.quant import get_format
from pykernels.quant.layout import padded
from runtime.devices.cpu.routed import CpuExperts

from ..architectures.schema import ROUTERS
from ..checkpoint.config import EXPERT_COUNTS
from ..modules.linear import Linear
from ..modules.moe import FusedMoE
from ..modules.placement import ModulePlacement
from ..modules.recognise import experts_per_token
from .formats import Formats

_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_CUT = "kv_b_proj.weight"
"""Cut into a matrix for each head by the engine, in bfloat16 unless its format can be cut so."""


@dataclass(frozen=True)
class Entry:
    """A module with weights of its own, or the routed experts of a block.

    Attributes:
        ours: whether it runs on our kernels, else transformers' own forward runs it.
        routed: whether these are routed experts.
        parameters: numbers; ``bytes``: in memory; ``token_bytes``: that one token's step reads of
            them (not of a norm, or of the one row of an embedding).
    """

    name: str
    cls: str
    ours: bool
    device: str
    format: str
    parameters: int
    bytes: int
    token_bytes: int
    routed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"class" if key == "cls" else key: value for key, value in asdict(self).items()}


def entries(
    model: PreTrainedModel,
    placement: ModulePlacement,
    formats: Formats,
    engine: bool,
    dtype: torch.dtype,
    routed: str = "cpu",
    slots: int = 0,
) -> Iterator[Entry]:
    """Entries of an injected meta model, in the order of its modules.

    Args:
        engine: whether the engine runs it: matrices packed as stored, vectors in float32.
        dtype: dtype of unpacked weights, without the engine.
        routed: the device of routed experts of ours; ``slots``: of each layer for some of them,
            where the rest of the layer is.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            yield packed_experts(name, module, formats, routed)
            if slots:
                yield _slots(name, module, formats, placement.of(name), slots)
        elif _are_experts(name, module):
            yield _fused_experts(name, module, model, placement.of(name), dtype)
            continue
        parameters = [(leaf, p) for leaf, p in module.named_parameters(recurse=False)]
        parameters += [
            (leaf, buffer)
            for leaf, buffer in module.named_buffers(recurse=False)
            if leaf not in module._non_persistent_buffers_set
        ]
        parameters = [(leaf, t) for leaf, t in parameters if id(t) not in seen]
        seen.update(id(tensor) for _, tensor in parameters)
        if parameters:
            around = model.get_submodule(name.rpartition(".")[0])
            on_gpu = placement.of(name) != "cpu"
            entry = _Sizes(name, module, around, formats, engine, dtype, tied, on_gpu)
            for leaf, tensor in parameters:
                entry.add(leaf, tensor)
            yield entry.finish(placement.of(name))


class _Sizes:
    """Adds up one module's tensors."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        around: nn.Module,
        formats: Formats,
        engine: bool,
        dtype: torch.dtype,
        tied: set[str],
        on_gpu: bool,
    ) -> None:
        self.name, self.module, self.around, self.formats = name, module, around, formats
        self.engine, self.dtype, self.tied, self.on_gpu = engine, dtype, tied, on_gpu
        self.parameters = self.bytes = self.read = 0
        self.format = ""

    def add(self, leaf: str, tensor: torch.Tensor) -> None:
        """A parameter or buffer."""
        full, shape = f"{self.name}.{leaf}", tuple(tensor.shape)
        tied = full in self.tied
        self.parameters += 0 if tied else math.prod(shape)
        embedding = isinstance(self.module, nn.Embedding)
        if isinstance(self.module, Linear) and leaf == "weight":
            fmt = self._placed(full, self.module.packed_format(self.formats.of_matrix(full)), shape)
            nbytes = self.module.packed_bytes(fmt)
        elif self.engine and (parts := self.formats.parts.get(full)):
            placed = [(self._placed(full, fmt, shape), rows) for fmt, rows in parts]
            nbytes = sum(matrix_bytes(fmt, rows, shape[1]) for fmt, rows in placed)
            fmt = "/".join(dict.fromkeys(fmt for fmt, _ in placed))
        elif self.engine and len(shape) == 2 and not embedding:
            fmt = self._placed(full, self._engine_format(full), shape)
            cut = full.endswith(_CUT)
            nbytes = _heads_bytes(fmt, self.around) if cut else matrix_bytes(fmt, *shape)
        else:
            kept = torch.float32 if self.engine and not embedding else self.dtype
            fmt = _SHORT.get(kept, str(kept))
            nbytes = 0 if tied else math.prod(shape) * kept.itemsize
        self.bytes += nbytes
        if len(shape) == 2 and not embedding:
            self.read += matrix_bytes(fmt, *shape) if tied and not nbytes else nbytes
        self.format = self.format or fmt

    def finish(self, device: str) -> Entry:
        """Its row."""
        ours = self.engine or isinstance(self.module, Linear)
        cls = type(self.module).__name__
        return Entry(
            self.name, cls, ours, device, self.format, self.parameters, self.bytes, self.read
        )

    def _placed(self, name: str, fmt: str, shape: tuple[int, ...]) -> str:
        """The format where the matrix runs: the engine dequantizes on a GPU what gives logits, the
        matrices of heads, and what no kernel there multiplies."""
        if not (self.engine and self.on_gpu):
            return fmt
        plain = name.endswith((_CUT, *ROUTERS, "lm_head.weight"))
        return "bf16" if plain or supports_format(get_format(fmt), shape[1]) else fmt

    def _engine_format(self, name: str) -> str:
        fmt = self.formats.of_matrix(name)
        plain = isinstance(self.module, nn.Linear)  # a router's matrix is not quantized
        if not plain and name not in self.formats.known:
            return "bf16"
        return "bf16" if name.endswith(_CUT) and fmt != "fp8" else fmt


def matrix_bytes(fmt: str, N: int, K: int) -> int:
    """Memory of a packed matrix."""
    format_ = get_format(fmt)
    return padded(N, 1)[0] // 32 * (format_.block_bytes(K) + format_.scale_bytes(K))


def _heads_bytes(fmt: str, attention: Any) -> int:
    """Bytes of ``kv_b_proj`` as the engine has it: ``W_UK`` and ``W_UV`` of each head."""
    L, nope, dv = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.v_head_dim
    return attention.num_heads * (matrix_bytes(fmt, L, nope) + matrix_bytes(fmt, dv, L))


def packed_experts(name: str, block: FusedMoE, formats: Formats, device: str) -> Entry:
    """A block's routed experts, all of them on a device."""
    shape = block.shape
    fmt, down = (block.packed_format(stored) for stored in formats.of_experts(name))
    reads = ((fmt, shape.H), (down, shape.I))
    if device != "cpu" and any(supports_format(get_format(f), K) for f, K in reads):
        fmt = down = "bf16"
    nbytes = CpuExperts.bytes_needed(shape, fmt, down)
    return Entry(
        f"{name}.experts",
        f"{shape.E} experts, top-{shape.topk}",
        True,
        device,
        "/".join(dict.fromkeys((fmt, down))),
        shape.E * shape.weights,
        nbytes,
        nbytes * shape.topk // shape.E,
        True,
    )


def _slots(name: str, block: FusedMoE, formats: Formats, device: str, count: int) -> Entry:
    """Room for some of the experts; it has no numbers of its own."""
    if not 0 < count < block.shape.E:
        raise PykernelsError(
            f"{count} slots for the {block.shape.E} experts of {name}",
            f"Give 1 to {block.shape.E - 1}",
        )
    whole = packed_experts(name, block, formats, device)
    nbytes = whole.bytes * count // block.shape.E
    cls = f"{count} slots, {count / block.shape.E:.0%}"
    return Entry(f"{name}.expert_cache", cls, True, device, whole.format, 0, nbytes, 0)


def _are_experts(name: str, module: nn.Module) -> bool:
    """Whether a module of transformers' holds the matrices of all experts of a block."""
    parameters = module.parameters(recurse=False)
    return name.endswith("experts") and any(parameter.ndim == 3 for parameter in parameters)


def _fused_experts(
    name: str, experts: nn.Module, model: PreTrainedModel, device: str, dtype: torch.dtype
) -> Entry:
    """Experts that transformers runs itself, unpacked."""
    config: Any = model.config
    E = next(int(n) for key in EXPERT_COUNTS if (n := getattr(config, key, None)))
    topk = int(experts_per_token(config) or 1)
    numbers = sum(p.numel() for p in experts.parameters())
    nbytes = numbers * dtype.itemsize
    return Entry(
        name,
        f"{E} experts, top-{topk}",
        False,
        device,
        _SHORT.get(dtype, str(dtype)),
        numbers,
        nbytes,
        nbytes * topk // E,
        True,
    )
