"""LFM2-MoE: layers with a short convolution in the place of attention, and layers with a dense MLP
in that of experts."""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes, experts


def _layer(config: Any, layer: int) -> Shapes:
    mixer = _short_conv if config.layer_types[layer] == "conv" else _attention
    mlp = _dense if layer < config.num_dense_layers else _experts
    return {
        "attn_norm.weight": (config.hidden_size,),
        **mixer(config),
        "ffn_norm.weight": (config.hidden_size,),
        **mlp(config),
    }


def _short_conv(config: Any) -> Shapes:
    H = config.hidden_size
    return {
        "shortconv.conv.weight": (H, config.conv_L_cache),
        "shortconv.in_proj.weight": (3 * H, H),
        "shortconv.out_proj.weight": (H, H),
    }


def _attention(config: Any) -> Shapes:
    H, D = config.hidden_size, _head(config)
    keys = config.num_key_value_heads * D
    return {
        "attn_q.weight": (H, H),
        "attn_k.weight": (keys, H),
        "attn_v.weight": (keys, H),
        "attn_output.weight": (H, H),
        "attn_q_norm.weight": (D,),
        "attn_k_norm.weight": (D,),
    }


def _head(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def _dense(config: Any) -> Shapes:
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    return {"ffn_gate.weight": (I, H), "ffn_up.weight": (I, H), "ffn_down.weight": (H, I)}


def _experts(config: Any) -> Shapes:
    E, H = config.num_experts, config.hidden_size
    router = {"ffn_gate_inp.weight": (E, H), "exp_probs_b.bias": (E,)}
    return router | experts(E, config.moe_intermediate_size, H)


def _rest(config: Any) -> Shapes:
    return {"token_embd_norm.weight": (config.hidden_size,)}


def _metadata(writer: Any, config: Any) -> None:
    from gguf import ExpertGatingFuncType

    kinds = {"conv": 0, "full_attention": config.num_key_value_heads}
    writer.add_head_count_kv([kinds[kind] for kind in config.layer_types])
    D = _head(config)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


FAMILIES = {"lfm2_moe": Family("lfm2moe", _layer, _metadata, _rest)}
"""By ``model_type``."""
