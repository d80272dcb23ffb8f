"""Tiny random models of every architecture that has rules, stored as their real checkpoints are.

Under the hub's names, one tensor an expert, by code of its own: nothing here calls what it tests.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from . import tiny_quantized

ARCHITECTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "lfm2_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)

# fmt: off
_BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 3, "max_position_embeddings": 128, "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": 48,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}
_NEXT: dict[str, Any] = {
    "num_experts": 8, "head_dim": 16, "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "num_hidden_layers": 4, "full_attention_interval": 2,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_MLA, "routed_scaling_factor": 2.5},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "glm4_moe": {
        "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "use_qk_norm": True,
    },
    "dots1": {
        "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "sliding_window": 24, "max_window_layers": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    },
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32,
        "hidden_size_per_layer_input": 0, "sliding_window": 24, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 0, "tie_word_embeddings": True,
    },
    "glm4_moe_lite": {**_MLA, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_oss": {
        "num_local_experts": 8, "intermediate_size": 32, "head_dim": 16, "sliding_window": 24,
        "swiglu_limit": 1.5,
    },
    "lfm2_moe": {
        "num_experts": 8, "num_dense_layers": 1, "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "minimax_m2": {
        "num_local_experts": 8, "intermediate_size": 32, "head_dim": 16, "rotary_dim": 8,
        "rope_parameters": {  # transformers 5.17 has no other way to turn a part
            "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5,
        },
    },
    "olmoe": {"num_experts": 8, "intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1,
    },
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    "qwen3_5_moe_text": {**_NEXT, "num_hidden_layers": 3},
    "qwen3_next": _NEXT,
}
# fmt: on
WHOLE = r"embed|lm_head|gate\.weight|in_proj_(ba|a|b)\."
"""Names of matrices that quantized checkpoints keep in bfloat16."""
ZERO_CENTRED = ("qwen3_5_moe_text", "qwen3_next")
"""Families whose norms are stored less 1."""
FACTORS = ("layer_scalar", "router.scale", "per_expert_scale")
"""Endings of the names of numbers about 1."""
FP8_WIDTHS: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "intermediate_size": 320,  # ragged: 2.5 blocks
}
FP8_SIZES: dict[str, Any] = {
    **FP8_WIDTHS,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,  # kv_a_proj_with_mqa: 160 rows, ragged as the real one's 576
}
"""Sizes at which the blocks of DeepSeek's FP8 matter, for `deepseek_v3`."""


class Gains(NamedTuple):
    """By how much random matrices grow what they multiply; ``choice`` and ``embedding``: standard
    deviations of the bias by which experts are chosen, and of the table."""

    layers: float = 1.5
    head: float = 1.5
    router: float = 1.5
    choice: float = 0.3
    embedding: float = 1.0


STRONG = Gains()


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk, and transformers' own float32 model on the values stored in it."""

    path: Path
    stored: dict[str, torch.Tensor]
    reference: PreTrainedModel


def make(
    path: Path,
    model_type: str,
    *,
    fp8: bool = False,
    compressed: str | None = None,
    shards: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    gains: Gains = STRONG,
    **config: Any,
) -> Tiny:
    """Write a random `model_type` checkpoint into `path`; `fp8`: as DeepSeek's are.

    `compressed`: a scheme of `tiny_quantized`, for all linear layers but the head and routers.
    """
    scheme = "deepseek" if fp8 else compressed
    sizes = FP8_SIZES if "kv_lora_rank" in _FAMILY.get(model_type, {}) else FP8_WIDTHS
    reference = build(model_type, seed, gains, **{**(sizes if fp8 else {}), **config})
    cfg = reference.config
    stored = store(reference, model_type, dtype, scheme)
    values = dict(reference.state_dict())
    fill(values, stored, model_type, scheme)
    reference.load_state_dict(values)
    reference.tie_weights()
    path.mkdir(parents=True, exist_ok=True)
    data = cfg.to_dict()
    data["architectures"] = [type(reference).__name__]
    data["dtype"] = "bfloat16"
    if scheme:
        data["quantization_config"] = tiny_quantized.config(scheme)
    (path / "config.json").write_text(json.dumps(data))
    write_shards(path, stored, shards)
    return Tiny(path, stored, reference)


def build(model_type: str, seed: int = 0, gains: Gains = STRONG, **config: Any) -> PreTrainedModel:
    """transformers' own model in float32, with random weights."""
    cfg = CONFIG_MAPPING[model_type](**{**_BASE, **_FAMILY.get(model_type, {}), **config})
    model = AutoModelForCausalLM.from_config(cfg, dtype=torch.float32).eval()
    randomize(model, seed, gains)
    return model


def randomize(model: PreTrainedModel, seed: int, gains: Gains = STRONG) -> None:
    """Weights by which every layer and expert counts; biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                gated = "linear_attn" in name  # whose norm is stored with its 1
                centre = 0 if model.config.model_type in ZERO_CENTRED and not gated else 1
                tensor.copy_(centre + 0.1 * noise)
                if model.config.model_type == "gemma4_text" and re.search("[qk]_norm", name):
                    tensor *= tensor.numel() ** -0.25  # its attention does not scale scores
            elif "A_log" in name:  # memories of some tens of tokens
                tensor.copy_(noise - 3)
            elif "moe_statics" in name:  # beside probabilities of about an eighth
                tensor.copy_(0.05 * noise)
            elif "e_score_correction_bias" in name or "expert_bias" in name:
                tensor.copy_(gains.choice * noise)
            elif name.endswith(FACTORS):
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.ndim < 2:
                tensor.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(gains.embedding * noise)
            else:
                router = re.search(r"\.(gate|router|router\.proj)\.weight$", name)
                gain = gains.head if "lm_head" in name else gains.layers
                gain = gains.router if router else gain
                if name.endswith("router.proj.weight"):  # whose inputs are 1 / sqrt(H) in size
                    gain *= math.sqrt(tensor.shape[-1])
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]) * gain)


def store(
    model: PreTrainedModel, model_type: str, dtype: torch.dtype, scheme: str | None
) -> dict[str, torch.Tensor]:
    """The model's values under the hub's names and in the hub's dtypes."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for key, matrix in split(name, tensor, model_type):
            linear = matrix.ndim == 2 and not re.search(WHOLE, key)
            if scheme and linear:
                stored |= tiny_quantized.quantize(key, matrix, scheme)
            elif "e_score_correction_bias" in key or "expert_bias" in key:
                stored[key] = matrix.clone()
            else:
                stored[key] = matrix.to(dtype).contiguous()
    return stored


def split(name: str, tensor: torch.Tensor, model_type: str) -> list[tuple[str, torch.Tensor]]:
    """One of transformers' tensors -> the hub's tensors: experts apart, a family's own names."""
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if model_type in ("mixtral", "minimax_m2"):
        name = name.replace(".mlp.", ".block_sparse_moe.")
        gate, up, down = "w1", "w3", "w2"
    if model_type == "lfm2_moe":
        gate, up, down = "w1", "w3", "w2"
    name = name.replace(".gate.moe_statics.", ".moe_statics.")  # Ernie's
    if model_type in ("gpt_oss", "gemma4_text"):  # stacked; gpt-oss' gate and up in turns
        return [(name, tensor)]
    if name.endswith("experts.gate_up_proj"):
        base, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        return [
            (f"{base}{e}.{proj}.weight", part)
            for e, both in enumerate(tensor)
            for proj, part in ((gate, both[:half]), (up, both[half:]))
        ]
    if name.endswith("experts.down_proj"):
        base = name.removesuffix("down_proj")
        return [(f"{base}{e}.{down}.weight", part) for e, part in enumerate(tensor)]
    return [(name, tensor)]


def fill(
    state: dict[str, torch.Tensor],
    stored: dict[str, torch.Tensor],
    model_type: str,
    scheme: str | None = None,
) -> None:
    """Put the stored values back into a state dict of transformers', as float32."""
    for name, tensor in state.items():
        for key, part in split(name, tensor, model_type):
            if tiny_quantized.holds(stored, key):
                part.copy_(tiny_quantized.value_of(stored, key, scheme))


def write_shards(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """`model.safetensors`, or several files and their index."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
