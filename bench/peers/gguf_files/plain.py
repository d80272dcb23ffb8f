"""Layers of attention and experts alone: Qwen3 and Mixtral."""

from __future__ import annotations

from functools import partial
from typing import Any

from .family import Family, Shapes, experts


def _layer(config: Any, layer: int, norms: bool, sizes: tuple[str, str]) -> Shapes:
    """The tensors of a layer.

    Args:
        norms: whether queries and keys are normed; ``sizes``: what a configuration calls the
            number of experts and their width.
    """
    H, D = config.hidden_size, _head(config)
    E, I = (getattr(config, name) for name in sizes)  # noqa: E741
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    return {
        "attn_norm.weight": (H,),
        "attn_q.weight": (queries, H),
        "attn_k.weight": (keys, H),
        "attn_v.weight": (keys, H),
        "attn_output.weight": (H, queries),
        "ffn_norm.weight": (H,),
        "ffn_gate_inp.weight": (E, H),
        **({f"attn_{part}_norm.weight": (D,) for part in "qk"} if norms else {}),
        **experts(E, I, H),
    }


def _head(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def add_heads(writer: Any, config: Any) -> None:
    """What a file says of heads that all layers have alike, and of how they turn."""
    D = _head(config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _metadata(writer: Any, config: Any) -> None:
    add_heads(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(_head(config))
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
    else:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_used_count(config.num_experts_per_tok)


_QWEN = partial(_layer, norms=True, sizes=("num_experts", "moe_intermediate_size"))
_MIXTRAL = partial(_layer, norms=False, sizes=("num_local_experts", "intermediate_size"))
FAMILIES = {
    "qwen3_moe": Family("qwen3moe", _QWEN, _metadata),
    "mixtral": Family("llama", _MIXTRAL, _metadata),
}
"""By ``model_type``."""
