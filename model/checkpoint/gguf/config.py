"""A GGUF file's metadata as what a config.json would hold.

Keys: ``gguf.constants.Keys``, and what llama.cpp's ``convert_hf_to_gguf.py`` writes under them.
What it does not write, because it is the same in all models of an architecture, stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykernels.errors import PykernelsError

from ..safetensors import Part
from .files import GGUF
from .metadata import Metadata
from .rope import rope

Config = dict[str, Any]
SIGMOID = 2
"""``expert_gating_func``; softmax is 1."""


def config_of(checkpoint: GGUF) -> Config:
    """What `CONFIG_MAPPING[model_type].from_dict` takes.

    Raises `PykernelsError` for an unknown architecture, and for metadata that is missing or wrong.
    """
    meta = Metadata(checkpoint.metadata, checkpoint.architecture, checkpoint.path)
    if checkpoint.architecture not in _FAMILIES:
        raise PykernelsError(
            f"The architecture {checkpoint.architecture!r} of {checkpoint.path} is not known",
            f"Use a file of one of {', '.join(_FAMILIES)}",
        )
    tensors = checkpoint.tensors
    if "token_embd.weight" not in tensors:
        raise PykernelsError(f"{checkpoint.path} has no token_embd.weight", "Download it again")
    heads = meta.count("attention.head_count")
    config: Config = {
        "dtype": "bfloat16",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": meta.count("embedding_length"),
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        **rope(meta, _frequency_factors(checkpoint)),
    }
    if extra := meta.count("nextn_predict_layers", 0):
        config["num_hidden_layers"] -= extra
        config["num_nextn_predict_layers"] = extra
    if meta.has("feed_forward_length"):
        config["intermediate_size"] = meta.count("feed_forward_length")
    if meta.has("attention.key_length"):
        config["head_dim"] = meta.count("attention.key_length")
    return config | _FAMILIES[checkpoint.architecture](meta, config, checkpoint)


def _frequency_factors(checkpoint: GGUF) -> list[float] | None:
    if "rope_freqs.weight" not in checkpoint.tensors:
        return None
    factors: list[float] = checkpoint.read(Part("rope_freqs.weight")).flatten().tolist()
    return factors


def _llama(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    if not meta.count("expert_count", 0):
        bias = "blk.0.ffn_gate.bias" in checkpoint.tensors
        return {"model_type": "llama", "mlp_bias": bias}
    return {
        "model_type": "mixtral",
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "sliding_window": None,
    }


def _qwen(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return {
        "model_type": "qwen3_moe",
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return _qwen(meta, config, checkpoint) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
        "shared_expert_intermediate_size": meta.count("expert_shared_feed_forward_length"),
    }


def _routed(meta: Metadata) -> Config:
    """Of the models that follow DeepSeek-V3."""
    return {
        "n_routed_experts": meta.count("expert_count"),
        "n_shared_experts": meta.count("expert_shared_count", 0),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "first_k_dense_replace": meta.count("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "n_group": meta.count("expert_group_count", 0) or 1,
        "topk_group": meta.count("expert_group_used_count", 0) or 1,
    }


def _deepseek2(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    """V2 by softmax, V3, R1 and Kimi-K2 by sigmoid. With ``*_mla`` keys the cache's own sizes stand
    under the plain ones."""
    rotary = meta.count("rope.dimension_count")
    key = meta.count("attention.key_length_mla", 0) or meta.count("attention.key_length")
    value = meta.count("attention.value_length_mla", 0) or meta.count("attention.value_length")
    routed, kind = _routed(meta), "deepseek_v3"
    if meta.count("expert_gating_func", 1) != SIGMOID:
        if routed["norm_topk_prob"]:
            raise meta.wrong("expert_weights_norm", True)
        kind = "deepseek_v2"
        grouped = routed["n_group"] > 1
        routed["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    return routed | {
        "model_type": kind,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": meta.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "head_dim": rotary,
    }


def _glm4(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    head = meta.count("attention.key_length")
    return _routed(meta) | {
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in checkpoint.tensors,
        "partial_rotary_factor": meta.count("rope.dimension_count", head) / head,
    }


def _dots(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return _routed(meta) | {"model_type": "dots1", "sliding_window": None}


def _gpt_oss(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    scaling = config.get("rope_scaling")
    return {
        "model_type": "gpt_oss",
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "intermediate_size": meta.count("expert_feed_forward_length"),
        "sliding_window": meta.count("attention.sliding_window"),
        "attention_bias": True,
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _olmoe(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return {
        "model_type": "olmoe",
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "clip_qkv": meta.number("attention.clamp_kqv", None),
        "norm_topk_prob": False,
    }


def _ernie(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    every = meta.count("interleave_moe_layer_step", 1) or 1
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": meta.count("expert_count"),
        "moe_k": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "moe_num_shared_experts": meta.count("expert_shared_count", 0),
        "moe_layer_start_index": meta.count("leading_dense_block_count", 0),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": every,
        "use_bias": config["attention_bias"],
    }


def _minimax(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return {
        "model_type": "minimax_m2",
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "intermediate_size": meta.count("expert_feed_forward_length"),
        "rotary_dim": meta.count("rope.dimension_count"),
    }


_FAMILIES: dict[str, Callable[[Metadata, Config, GGUF], Config]] = {
    "llama": _llama,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "ernie4_5-moe": _ernie,
    "dots1": _dots,
    "minimax-m2": _minimax,
}
"""By ``general.architecture``."""
