"""Qwen3-Next and Qwen3.5: layers with gated delta nets in the place of attention, gates of
attention, and a shared expert with one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .family import Family, Shapes, experts
from .plain import add_heads


def _layer(config: Any, layer: int) -> Shapes:
    H, I = config.hidden_size, config.shared_expert_intermediate_size  # noqa: E741
    kind = config.layer_types[layer]
    return {
        "attn_norm.weight": (H,),
        "post_attention_norm.weight": (H,),
        **(_delta_net(config) if kind == "linear_attention" else _attention(config)),
        "ffn_gate_inp.weight": (config.num_experts, H),
        "ffn_gate_inp_shexp.weight": (H,),
        "ffn_gate_shexp.weight": (I, H),
        "ffn_up_shexp.weight": (I, H),
        "ffn_down_shexp.weight": (H, I),
        **experts(config.num_experts, config.moe_intermediate_size, H),
    }


def _attention(config: Any) -> Shapes:
    H, D = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    return {
        "attn_q.weight": (2 * queries, H),  # each head's gate behind it
        "attn_k.weight": (keys, H),
        "attn_v.weight": (keys, H),
        "attn_output.weight": (H, queries),
        "attn_q_norm.weight": (D,),
        "attn_k_norm.weight": (D,),
    }


def _delta_net(config: Any) -> Shapes:
    H, HV, DV = config.hidden_size, config.linear_num_value_heads, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + HV * DV
    gates: Shapes = {"ssm_alpha.weight": (HV, H), "ssm_beta.weight": (HV, H)}
    if config.model_type == "qwen3_next":
        gates = {"ssm_ba.weight": (2 * HV, H)}
    return {
        "attn_qkv.weight": (channels, H),
        "attn_gate.weight": (HV * DV, H),
        **gates,
        "ssm_conv1d.weight": (channels, config.linear_conv_kernel_dim),
        "ssm_dt.bias": (HV,),
        "ssm_a": (HV,),
        "ssm_norm.weight": (DV,),
        "ssm_out.weight": (H, HV * DV),
    }


def _metadata(writer: Any, config: Any) -> None:
    add_heads(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if (size := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(size)
    D, HV = config.head_dim, config.linear_num_value_heads
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(HV)
    writer.add_ssm_inner_size(HV * config.linear_value_head_dim)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    architecture = FAMILIES[config.model_type].architecture
    writer.add_array(f"{architecture}.attention.recurrent_layers", recurrent)
    turned = int(D * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    if config.model_type == "qwen3_5_moe_text":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _vector(config: Any, name: str, shape: tuple[int, ...]) -> Any:
    """Ones, but for a decay's rate, which is below 0."""
    return np.full(shape, -1.0 if name.endswith("ssm_a") else 1.0, np.float32)


FAMILIES = {
    "qwen3_next": Family("qwen3next", _layer, _metadata, vector=_vector),
    "qwen3_5_moe_text": Family("qwen35moe", _layer, _metadata, vector=_vector),
}
"""By ``model_type``."""
