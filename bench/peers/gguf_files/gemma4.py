"""Gemma 4: layers with a window and full ones, whose heads have other sizes and counts; a dense MLP
beside the experts, and a norm in front of and behind each."""

from __future__ import annotations

from typing import Any

import numpy as np

from .family import Family, Shapes

_FULL = "full_attention"
_NORMS = (
    "attn_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "post_ffw_norm_1",
    "pre_ffw_norm_2",
    "post_ffw_norm_2",
)
_STOPPED = 1e30
"""The divisor of a frequency that does not turn."""


def _layer(config: Any, layer: int) -> Shapes:
    H, I, E = config.hidden_size, config.intermediate_size, config.num_experts  # noqa: E741
    own = config.per_layer_config[layer]
    D, full = own.head_dim, config.layer_types[layer] == _FULL
    queries, keys = config.num_attention_heads * D, own.num_key_value_heads * D
    values = {} if full and config.attention_k_eq_v else {"attn_v.weight": (keys, H)}
    return {
        **{f"{name}.weight": (H,) for name in _NORMS},
        "attn_q.weight": (queries, H),
        "attn_k.weight": (keys, H),
        **values,
        "attn_output.weight": (H, queries),
        "attn_q_norm.weight": (D,),
        "attn_k_norm.weight": (D,),
        "layer_output_scale.weight": (1,),
        "ffn_gate.weight": (I, H),
        "ffn_up.weight": (I, H),
        "ffn_down.weight": (H, I),
        "ffn_gate_inp.weight": (E, H),
        "ffn_gate_inp.scale": (H,),
        "ffn_gate_up_exps.weight": (E, 2 * config.moe_intermediate_size, H),
        "ffn_down_exps.weight": (E, H, config.moe_intermediate_size),
        "ffn_down_exps.scale": (E,),
    }


def _head(config: Any, kind: str) -> int:
    return int(config.per_layer_config[config.layer_types.index(kind)].head_dim)


def _rest(config: Any) -> Shapes:
    shapes: Shapes = {"output_norm.weight": (config.hidden_size,)}
    if _FULL in config.layer_types:
        shapes["rope_freqs.weight"] = (_head(config, _FULL) // 2,)
    return shapes


def _vector(config: Any, name: str, shape: tuple[int, ...]) -> Any:
    """Ones; of the pairs of a full layer's head only the first ones turn."""
    found = np.ones(shape, np.float32)
    if name == "rope_freqs.weight":
        share = config.rope_parameters[_FULL]["partial_rotary_factor"]
        found[int(share * len(found)) :] = _STOPPED
    return found


def _metadata(writer: Any, config: Any) -> None:
    windowed = [kind != _FULL for kind in config.layer_types]
    local = _head(config, "sliding_attention")
    full = _head(config, _FULL) if _FULL in config.layer_types else local
    counts = (config.per_layer_config[i].num_key_value_heads for i in range(len(windowed)))
    writer.add_head_count_kv(list(counts))
    for add, size in (
        (writer.add_key_length, full),
        (writer.add_value_length, full),
        (writer.add_rope_dimension_count, full),
        (writer.add_key_length_swa, local),
        (writer.add_value_length_swa, local),
        (writer.add_rope_dimension_count_swa, local),
    ):
        add(size)
    writer.add_rope_freq_base(config.rope_parameters[_FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.top_k_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


FAMILIES = {"gemma4_text": Family("gemma4", _layer, _metadata, _rest, _vector)}
"""By ``model_type``."""
