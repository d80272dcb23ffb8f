"""What a configuration of each architecture has of its own, from a GGUF file's metadata.

What llama.cpp's ``convert_hf_to_gguf.py`` does not write, because it is the same in all models of
an architecture, stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .files import GGUF
from .metadata import Metadata
from .rope import turned_share

Config = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``; 0 stands for the model's default."""


def _llama(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    if not meta.count("expert_count", 0):
        return {"model_type": "llama"}
    return {
        "model_type": "mixtral",
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "sliding_window": None,
    }


def _qwen(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return {
        "model_type": "qwen3_moe",
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": _expert_size(meta),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return _qwen(meta, config, checkpoint) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "qkv_bias": False,
        "shared_expert_intermediate_size": (
            meta.count("expert_shared_feed_forward_length", 0) or meta.size("feed_forward_length")
        ),
    }


def _qwen3next(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    """Gated delta nets in parallel with attention. llama.cpp has values of the size of keys
    alone."""
    size, heads = meta.size("ssm.state_size"), meta.size("ssm.time_step_rank")
    groups, layers = meta.size("ssm.group_count"), config["num_hidden_layers"]
    if (inner := meta.size("ssm.inner_size")) != heads * size:
        raise meta.unsupported("ssm.inner_size", inner, f"{heads} heads of {size}")
    if heads % groups:
        raise meta.wrong("ssm.group_count", groups)
    if (width := meta.size("ssm.conv_kernel")) < 2:
        raise meta.wrong("ssm.conv_kernel", width)
    every, recurrent = (
        meta.size("full_attention_interval", 4),
        meta.flags("attention.recurrent_layers"),
    )
    if recurrent is None:
        recurrent = [(i + 1) % every != 0 for i in range(layers)]
    if len(recurrent) < layers:
        raise meta.wrong("attention.recurrent_layers", recurrent)
    return _qwen2(meta, config, checkpoint) | {
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "layer_types": [
            "linear_attention" if one else "full_attention" for one in recurrent[:layers]
        ],
        "linear_conv_kernel_dim": width,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "partial_rotary_factor": meta.size("rope.dimension_count") / config["head_dim"],
    }


def _qwen35(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    """The value heads of a delta net are in turns: the first of each key head, then the second."""
    return _qwen3next(meta, config, checkpoint) | {
        "model_type": "qwen3_5_moe_text",
        "tiled_value_heads": True,
    }


def _expert_size(meta: Metadata) -> int:
    """Numbers between an expert's matrices; where they are not stored, all chosen experts together
    have those of a dense layer."""
    stored: int = meta.count("expert_feed_forward_length", 0)
    return stored or meta.size("feed_forward_length") // meta.size("expert_used_count")


def _routed(meta: Metadata) -> Config:
    """Routing fields of models that follow DeepSeek-V3."""
    groups = meta.count("expert_group_count", 0) or 1
    open_groups = meta.count("expert_group_used_count", 0)
    if groups > 1 and not open_groups:
        raise meta.wrong("expert_group_used_count", open_groups)
    return {
        "n_routed_experts": meta.size("expert_count"),
        "n_shared_experts": meta.count("expert_shared_count", 0),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": _expert_size(meta),
        "first_k_dense_replace": meta.count("leading_dense_block_count", 0),
        # 0 stands for 1, not scaled.
        "routed_scaling_factor": meta.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": open_groups if groups > 1 else 1,
    }


def _deepseek2(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    """V2 by softmax, V3, R1 and Kimi-K2 by sigmoid. With ``*_mla`` keys the cache's own sizes stand
    under the plain ones."""
    rotary = meta.size("rope.dimension_count")
    key = meta.count("attention.key_length_mla", 0) or meta.size("attention.key_length")
    value = meta.count("attention.value_length_mla", 0) or meta.size("attention.value_length")
    if rotary >= key:
        raise meta.wrong("rope.dimension_count", rotary)
    routed, kind = _routed(meta), "deepseek_v3"
    if _gating(meta, config) == SOFTMAX:
        if routed["norm_topk_prob"]:
            raise meta.unsupported("expert_weights_norm", True, "False, beside a softmax,")
        kind = "deepseek_v2"
        grouped = routed["n_group"] > 1
        routed["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    # llama.cpp asks the tensors too: small models have no latent of the queries.
    whole = "blk.0.attn_q.weight" in checkpoint.tensors
    return routed | {
        "model_type": kind,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": None if whole else meta.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "head_dim": rotary,
    }


def _gating(meta: Metadata, config: Config) -> int:
    """SOFTMAX or SIGMOID. The first files of GLM-4.7-Flash and of DeepSeek-V2 do not say it."""
    stored: int = meta.count("expert_gating_func", 0)
    if stored in (SOFTMAX, SIGMOID):
        return stored
    if stored:
        raise meta.unsupported("expert_gating_func", stored, f"{SOFTMAX} or {SIGMOID}")
    flash = config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == 154880
    return SIGMOID if flash else SOFTMAX


def _glm4(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    head = config["head_dim"]
    return _routed(meta) | {
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in checkpoint.tensors,
        "partial_rotary_factor": meta.count("rope.dimension_count", head) / head,
    }


def _dots(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return _routed(meta) | {"model_type": "dots1", "sliding_window": None}


def _gpt_oss(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    window = meta.size("attention.sliding_window")
    period = meta.count("attention.sliding_window_pattern", 2)
    windowed = [not period or i % period < period - 1 for i in range(config["num_hidden_layers"])]
    return {
        "model_type": "gpt_oss",
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "attention_bias": True,
        "rope_scaling": {**config["rope_scaling"], "truncate": False},
    }


def _olmoe(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return {
        "model_type": "olmoe",
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "clip_qkv": meta.number("attention.clamp_kqv", 0.0) or None,
        "norm_topk_prob": False,
    }


def _ernie(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    every = meta.count("interleave_moe_layer_step", 1) or 1
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": meta.size("expert_count"),
        "moe_k": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "moe_num_shared_experts": meta.count("expert_shared_count", 0),
        "moe_layer_start_index": meta.count("leading_dense_block_count", 0),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": every,
        "use_bias": False,
    }


def _minimax(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return {
        "model_type": "minimax_m2",
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
        "rotary_dim": meta.size("rope.dimension_count"),
    }


def _lfm2(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    heads = meta.by_layer("attention.head_count_kv", config["num_key_value_heads"])
    if (places := meta.size("shortconv.l_cache")) < 2:
        raise meta.wrong("shortconv.l_cache", places)
    return {
        "model_type": "lfm2",
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": places,
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,  # the stored size is the adjusted one
    }


def _lfm2_moe(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    return _lfm2(meta, config, checkpoint) | {
        "model_type": "lfm2_moe",
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "num_dense_layers": meta.count("leading_dense_block_count", 0),
    }


def _gemma4(meta: Metadata, config: Config, checkpoint: GGUF) -> Config:
    """Layers with a window, and full ones whose heads have other sizes and counts."""
    if (kind := config["rope_scaling"]["rope_type"]) != "default":
        raise meta.unsupported("rope.scaling.type", kind, "none")
    pattern = "attention.sliding_window_pattern"
    windowed = meta.flags(pattern) or []
    if len(windowed) != config["num_hidden_layers"]:
        raise meta.wrong(pattern, meta.value(pattern))
    counts = meta.by_layer("attention.head_count_kv", config["num_key_value_heads"])
    own, D = config["head_dim"], meta.size("attention.key_length_swa", config["head_dim"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (size := meta.count(key, D)) != D:
            raise meta.unsupported(key, size, f"the {D} of attention.key_length_swa")
    local = {count for count, one in zip(counts, windowed, strict=True) if one}
    if len(local) > 1:
        key = "attention.head_count_kv"
        raise meta.unsupported(key, counts, "one value for all layers with a window")
    full = [i for i, one in enumerate(windowed) if not one]
    values = (f"blk.{i}.attn_v.weight" in checkpoint.tensors for i in full)
    experts = meta.count("expert_count", 0)
    return {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": meta.size("attention.sliding_window"),
        "head_dim": D,
        "num_key_value_heads": min(local, default=counts[0]),
        "per_layer_config": {i: {"head_dim": own, "num_key_value_heads": counts[i]} for i in full},
        "attention_k_eq_v": bool(full) and not any(values),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": turned_share(checkpoint, own),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": meta.number("rope.freq_base_swa", 10000.0),
            },
        },
        "final_logit_softcapping": meta.number("final_logit_softcapping", 0.0) or None,
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": meta.size("expert_used_count") if experts else None,
        "moe_intermediate_size": _expert_size(meta) if experts else None,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }


FAMILIES: dict[str, Callable[[Metadata, Config, GGUF], Config]] = {
    "llama": _llama,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen,
    "qwen3next": _qwen3next,
    "qwen35moe": _qwen35,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "ernie4_5-moe": _ernie,
    "dots1": _dots,
    "minimax-m2": _minimax,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
}
"""Families by ``general.architecture``."""
