"""What GGUF files of LFM2-MoE have otherwise than those of Qwen3: layers with a short convolution
in the place of attention, and layers with a dense MLP in that of experts."""

from __future__ import annotations

from typing import Any

ARCHITECTURES = {"lfm2_moe": "lfm2moe"}
"""``model_type``s, and llama.cpp's names for them."""
Shapes = dict[str, tuple[int, ...]]


def shapes(config: Any, layer: int) -> Shapes:
    """The tensors of one layer but its routed experts, by llama.cpp's names after the layer's."""
    mixer = _short_conv if config.layer_types[layer] == "conv" else _attention
    mlp = _dense if layer < config.num_dense_layers else _router
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
    H = config.hidden_size
    D = H // config.num_attention_heads
    keys = config.num_key_value_heads * D
    return {
        "attn_q.weight": (H, H),
        "attn_k.weight": (keys, H),
        "attn_v.weight": (keys, H),
        "attn_output.weight": (H, H),
        "attn_q_norm.weight": (D,),
        "attn_k_norm.weight": (D,),
    }


def _dense(config: Any) -> Shapes:
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    return {"ffn_gate.weight": (I, H), "ffn_up.weight": (I, H), "ffn_down.weight": (H, I)}


def _router(config: Any) -> Shapes:
    E = config.num_experts
    return {"ffn_gate_inp.weight": (E, config.hidden_size), "exp_probs_b.bias": (E,)}


def kv_heads(config: Any) -> list[int]:
    """Of each layer: 0 of those without attention."""
    kinds = {"conv": 0, "full_attention": config.num_key_value_heads}
    return [kinds[kind] for kind in config.layer_types]


def add_metadata(writer: Any, config: Any) -> None:
    """What a file says of its convolutions, its dense layers and its router."""
    from gguf import ExpertGatingFuncType

    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
