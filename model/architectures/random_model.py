"""Decoders of well-known shapes with random weights, to time a step without a checkpoint.

Only shapes and bytes count for that: a matrix is 128 random rows again and again, and all experts
of a layer hold the same numbers, each in memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from pykernels.errors import PykernelsError
from pykernels.quant import Weight, get_format
from pykernels.quant.split import repeat_first
from runtime.machine.memory import collapse
from runtime.matrix import Pack

from ..checkpoint.memory import available, size
from ..modules.inject import inject
from ..modules.moe import FusedMoE
from ..rules import default_rules
from .decoder import Decoder, make_decoder
from .packing import FromSource
from .weights import Loaded

_ROWS = 128


def random_decoder(
    config: PretrainedConfig, fmt: str, pack: Pack, kernel: str = "auto", activations: str = "bf16"
) -> Decoder:
    """A decoder of those shapes, its matrices in ``fmt``; where that cannot be (K-quants of narrow
    matrices) in bfloat16, as routers and the embedding are."""
    from ..pretrained import build_meta

    get_format(fmt)
    model = build_meta(config, torch.bfloat16)
    rules = default_rules(config.model_type)
    inject(model, rules, kernel)
    for module in model.modules():
        if isinstance(module, FusedMoE):
            module.activations = activations
            _fill(module, fmt)
    return make_decoder(model, FromSource(_Random(model, fmt), pack))


def check_memory(name: str, config: PretrainedConfig, fmt: str) -> None:
    """Before a weight is filled: whether they all fit.

    Raises:
        PykernelsError: they do not; it says how many layers would.
    """
    from ..pretrained import build_meta

    meta: Any = build_meta(config, torch.bfloat16)
    a_weight = weight_bytes(fmt)
    layers = a_weight * sum(p.numel() for p in meta.model.layers.parameters())
    rest = sum(p.numel() for p in meta.parameters()) * a_weight - layers
    rest += 2 * config.vocab_size * config.hidden_size  # the embedding stays bfloat16
    free = 0.9 * available()
    if layers + rest > free:
        L = config.num_hidden_layers
        fit = int((free - rest) / (layers / L))
        hint = f"Give --layers {fit}" if fit > 0 else "Free some memory"
        raise PykernelsError(
            f"{name} with {L} layers needs {size(int(layers + rest))} in {fmt},"
            f" {size(int(free))} are free",
            hint,
        )


def weight_bytes(fmt: str) -> float:
    """Bytes of one weight, its share of the scales included."""
    found, K = get_format(fmt), 4096
    return (found.block_bytes(K) + found.scale_bytes(K)) / (32 * K)


def _fill(module: FusedMoE, fmt: str) -> None:
    routed = module.allocate(fmt)
    H, I = routed.shape.H, routed.shape.I  # noqa: E741
    gate, up, down = (_matrix(fmt, *shape)[1] for shape in ((I, H), (I, H), (H, I)))
    routed.load_expert(0, gate, up, down)
    repeat_first(routed.weights)
    for part in routed.weights.slices:
        collapse(part.gate_up)
        collapse(part.down)


class _Random(Loaded):
    """A ``weights.Source`` of random numbers."""

    def __init__(self, model: torch.nn.Module, fmt: str) -> None:
        self._shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
        self._shapes |= {name: tensor.shape for name, tensor in model.named_buffers()}
        self._fmt = fmt

    def matrix(self, name: str) -> tuple[str, Weight]:
        N, K = self._shapes[name]
        plain = "embed_tokens" in name or name.endswith("mlp.gate.weight")
        narrow = K % get_format(self._fmt).k_multiple or "kv_b_proj" in name
        scaled = self._fmt in ("bf16", "fp8")
        return _matrix("bf16" if plain or (narrow and not scaled) else self._fmt, N, K)

    def stack(self, name: str) -> None:
        return None

    def tensor(self, name: str) -> torch.Tensor | None:
        if (shape := self._shapes.get(name)) is None:
            return None
        value = 1.0 if "norm" in name else 0.0
        return torch.full(shape, value, dtype=torch.float32, device="cpu")


def _matrix(fmt: str, N: int, K: int) -> tuple[str, Weight]:
    generator = torch.Generator().manual_seed(N + K)
    base = get_format(fmt).quantize(
        torch.randn(_ROWS, K, generator=generator, dtype=torch.float32, device="cpu") / K**0.5
    )

    def repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        times = -(-rows // tensor.shape[0])
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        return bits.repeat(times, 1)[:rows].contiguous().view(tensor.dtype)

    scale = base.scale
    if scale is not None:
        scale = repeated(scale, -(-N // _ROWS) if scale.shape[0] == 1 else N)
    return fmt, Weight(repeated(base.data, N), scale)
