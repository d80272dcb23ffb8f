"""Decoders of well-known shapes with random weights, to time a step without a checkpoint.

Only shapes and bytes count for that: a matrix is 128 random rows again and again, and all experts
of a layer hold the same numbers, each in memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from transformers import PretrainedConfig

from pykernels.errors import PykernelsError
from pykernels.quant import Biases, Weight, get_format
from runtime.machine.nodes import ONE_NODE, MemoryNodes
from runtime.program.weight_spec import WeightSpec
from runtime.program.weights import Expert, WeightStore
from runtime.workers.matrix import Pack

from .architectures.decoder import Decoder, make_decoder
from .architectures.schema import ROUTERS, Schema, Tensor, loaded_schema
from .architectures.weights import MatrixSource
from .checkpoint.memory import available, size, weight_bytes
from .modules.inject import inject
from .modules.moe import FusedMoE
from .rules import default_rules

_ROWS = 128
_FACTORS = ("norm", "scale", "scalar")
"""What the names of weights have that multiply: they are ones."""
_NARROW = {
    **dict.fromkeys(("q2_k", "q3_k", "tq1_0", "tq2_0", "q2_0"), "q4_0"),
    **{"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"},
    **dict.fromkeys(
        ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"
    ),
}
"""What `llama-quantize` takes for matrices whose rows are no multiple of a type's blocks."""


def random_decoder(
    config: PretrainedConfig,
    fmt: str,
    pack: Pack,
    kernel: str = "auto",
    activations: str = "bf16",
    nodes: MemoryNodes = ONE_NODE,
) -> Decoder:
    """A decoder of those shapes, its matrices in ``fmt``, or where that cannot be in the format of
    ``fitting``; routers and the embedding are bfloat16. A device makes the weights when it loads
    them."""
    from .pretrained import build_meta

    get_format(fmt)
    model = build_meta(config, torch.bfloat16)
    inject(model, default_rules(config.model_type), kernel)
    blocks = [module for module in model.modules() if isinstance(module, FusedMoE)]
    for block in blocks:
        block.activations = activations
    shapes = {name: tensor.shape for name, tensor in loaded_schema(model).tensors.items()}
    formats = {name: _format(name, shape, fmt) for name, shape in shapes.items()}
    schema = Schema(
        {name: Tensor(shape, formats[name], formats[name]) for name, shape in shapes.items()},
        {
            block.name: (fitting(fmt, block.shape.H), fitting(fmt, block.shape.I))
            for block in blocks
        },
    )
    return make_decoder(model, schema, WeightStore(RandomWeights(schema), pack, nodes))


_ROUTERS = tuple(f".{ending}" for ending in ROUTERS)


class RandomWeights(MatrixSource):
    """Random numbers in the formats of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._tensors = schema.tensors

    def tensor(self, spec: WeightSpec) -> torch.Tensor:
        value = 1.0 if any(part in spec.name for part in _FACTORS) else 0.0
        return torch.full(spec.shape, value, dtype=torch.float32, device="cpu")

    def matrix(self, name: str, index: int | None, fmt: str) -> tuple[str, Weight]:
        N, K = self._tensors[name].shape[-2:]
        own = self._tensors[name].fmt
        return own, _matrix(own, N, K)

    def experts(self, spec: WeightSpec) -> Iterator[Expert]:
        if spec.parts:  # an MLP
            yield from super().experts(spec)
            return
        assert spec.moe is not None
        H, I = spec.moe.H, spec.moe.I  # noqa: E741
        weights = _matrix(spec.fmt, I, H), _matrix(spec.fmt, I, H), _matrix(spec.down_fmt, H, I)
        biases = None
        if spec.moe.spec.bias:
            zeros = (torch.zeros(N, dtype=torch.float32, device="cpu") for N in (I, I, H))
            biases = Biases(*zeros)
        for _ in range(spec.moe.E):
            yield weights, biases


def check_memory(name: str, config: PretrainedConfig, fmt: str) -> None:
    """Before a weight is filled: whether they all fit.

    Raises:
        PykernelsError: they do not; it says how many layers would.
    """
    from .pretrained import build_meta

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


def _format(name: str, shape: tuple[int, ...], fmt: str) -> str:
    if len(shape) != 2 or "embed_tokens" in name or name.endswith(_ROUTERS):
        return "bf16"
    if "kv_b_proj" in name and fmt not in ("bf16", "fp8"):
        return "bf16"
    return fitting(fmt, shape[1])


def fitting(fmt: str, K: int) -> str:
    """A format of matrices with K inputs: ``fmt`` itself if their rows are whole blocks of it, else
    what `llama-quantize` takes instead, int8 blocks of 32, or bfloat16."""
    for each in (fmt, _NARROW.get(fmt, "q8_0")):
        if K % get_format(each).k_multiple == 0:
            return each
    return "bf16"


@lru_cache(maxsize=64)
def _rows(fmt: str, K: int, seed: int) -> Weight:
    """The rows of a matrix; layers have the same ones, and to quantize them takes longest."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(_ROWS, K, generator=generator, dtype=torch.float32, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so few numbers take longer by many, beside the workers
    try:
        return get_format(fmt).quantize(rows / K**0.5)
    finally:
        torch.set_num_threads(threads)


def _matrix(fmt: str, N: int, K: int) -> Weight:
    base = _rows(fmt, K, N + K)

    def repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        times = -(-rows // tensor.shape[0])
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        return bits.repeat(times, 1)[:rows].contiguous().view(tensor.dtype)

    scale = base.scale
    if scale is not None:
        scale = repeated(scale, -(-N // _ROWS) if scale.shape[0] == 1 else N)
    return Weight(repeated(base.data, N), scale)
