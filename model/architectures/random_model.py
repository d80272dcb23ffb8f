"""Decoders of well-known shapes with random weights, to time a step without a checkpoint.

Only shapes and bytes count for that: a matrix is 128 random rows again and again, and all experts
of a layer hold the same numbers, each in memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from pykernels.errors import PykernelsError
from pykernels.quant import Weight, get_format
from pykernels.quant.split import repeat_first
from runtime.machine.memory import collapse
from runtime.matrix import Pack

from ..modules.inject import inject
from ..modules.moe import FusedMoE
from ..rules import default_rules
from .decoder import Decoder, make_decoder
from .weights import FromSource, Loaded

_ROWS = 128
_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "routed_scaling_factor": 2.5, "vocab_size": 129280,
    "first_k_dense_replace": 3, "max_position_embeddings": 163840, "num_hidden_layers": 61,
}  # fmt: skip
ARCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b": ("qwen3_moe", {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 48, "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    }),
    "mixtral-8x7b": ("mixtral", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_hidden_layers": 32, "max_position_embeddings": 32768,
    }),
    "deepseek-v2-lite": ("deepseek_v2", {
        "hidden_size": 2048, "moe_intermediate_size": 1408, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "topk_method": "greedy", "vocab_size": 102400, "first_k_dense_replace": 1,
        "num_hidden_layers": 27, "max_position_embeddings": 32768,
    }),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK),
}  # fmt: skip
"""By name: the ``model_type`` and the settings that differ from its defaults."""


def make_config(arch: str, **changes: Any) -> PretrainedConfig:
    """The configuration of one of ``ARCHS``; ``changes`` that are None are left out.

    Raises:
        PykernelsError: there is none of that name.
    """
    if arch not in ARCHS:
        raise PykernelsError(f"there is no architecture {arch!r}", f"Use {', '.join(ARCHS)}")
    model_type, settings = ARCHS[arch]
    given = {key: value for key, value in changes.items() if value is not None}
    config = CONFIG_MAPPING[model_type](**(settings | given))
    config.architectures = []
    return config


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

    def tensor(self, name: str) -> torch.Tensor | None:
        if (shape := self._shapes.get(name)) is None:
            return None
        return torch.ones(shape) if "norm" in name else torch.zeros(shape)


def _matrix(fmt: str, N: int, K: int) -> tuple[str, Weight]:
    generator = torch.Generator().manual_seed(N + K)
    base = get_format(fmt).quantize(torch.randn(_ROWS, K, generator=generator) / K**0.5)

    def repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        times = -(-rows // tensor.shape[0])
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        return bits.repeat(times, 1)[:rows].contiguous().view(tensor.dtype)

    scale = base.scale
    if scale is not None:
        scale = repeated(scale, -(-N // _ROWS) if scale.shape[0] == 1 else N)
    return fmt, Weight(repeated(base.data, N), scale)
