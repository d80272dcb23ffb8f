"""The table: models of every family, and sizes and settings in which their files differ.

No two sizes of a plain row are equal, so that none can stand for another. What the kernels are
compiled for (the size of a head, a format, an expert's activation) is the same in all rows.
"""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 72,
    "intermediate_size": 104,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 5,
    "max_position_embeddings": 256,
    "num_attention_heads": 6,
}
_GQA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"intermediate_size": 40, "num_local_experts": 9}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 56,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 3,
    "n_shared_experts": 2,
}
_NEXT: dict[str, Any] = {
    "num_experts": 9,
    "shared_expert_intermediate_size": 56,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
}
_LFM2: dict[str, Any] = {
    "hidden_size": 80,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": False,
}
_PLAIN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_MLA, **_GROUPS},
    "deepseek_v3": {**_MLA, **_GROUPS},
    "dots1": {**_GQA, **_GROUPS},
    "ernie4_5_moe": {**_GQA, "moe_num_experts": 9, "moe_k": 5},
    "gemma4_text": {
        **_GQA,
        "num_experts": 9,
        "top_k_experts": 5,
        "global_head_dim": 32,
        "num_global_key_value_heads": 3,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {**_GQA, **_GROUPS},
    "glm4_moe_lite": {**_MLA, **_GROUPS},
    "gpt_oss": {**_GQA, **_EXPERTS},
    "lfm2": {**_LFM2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_LFM2, "num_experts": 9, "num_dense_layers": 1},
    "llama": _GQA,
    "minimax_m2": {**_GQA, **_EXPERTS},
    "mixtral": {**_GQA, **_EXPERTS},
    "olmoe": {
        "intermediate_size": 40,
        "num_experts": 9,
        "hidden_size": 96,
        "num_key_value_heads": 2,
    },
    "qwen2_moe": {**_GQA, "num_experts": 9, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {**_GQA, "num_experts": 9},
    "qwen3_5_moe_text": {**_NEXT, "num_experts_per_tok": 7},
    "qwen3_next": {**_NEXT, "mlp_only_layers": [2]},
}
_ONE_KEY_HEAD = {"num_attention_heads": 4, "num_key_value_heads": 1}
_THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
_NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
_ODD = {"hidden_size": 45, "intermediate_size": 51, "vocab_size": 99}
_SIX = {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 3,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v2, one head": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "n_routed_experts": 7,
        "topk_method": "greedy",
        "moe_intermediate_size": 21,
    },
    "deepseek_v3, odd latents": {"q_lora_rank": 17, "v_head_dim": 33},
    "deepseek_v3, expanded": {"qk_nope_head_dim": 16, "v_head_dim": 16},
    "deepseek_v3, no latent queries": {
        "q_lora_rank": None,
        "attention_bias": True,
        **_THREE_HEADS,
        **_ODD,
    },
    "deepseek_v3, nine experts": {
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 3,
        "moe_intermediate_size": 11,
        "intermediate_size": 45,
        "vocab_size": 77,
    },
    "dots1, one key head": {**_ONE_KEY_HEAD, "attention_bias": True, "moe_intermediate_size": 19},
    "dots1, odd": {**_THREE_HEADS, **_ODD, **_SIX},
    "ernie4_5_moe, one key head": {
        **_ONE_KEY_HEAD,
        "use_bias": True,
        "moe_intermediate_size": 19,
    },
    "ernie4_5_moe, odd": {**_THREE_HEADS, **_ODD, "use_bias": True, "moe_num_experts": 7},
    "gemma4_text, dense": {"enable_moe_block": False, "sliding_window": 60},
    "glm4_moe, one key head": {
        **_ONE_KEY_HEAD,
        "attention_bias": True,
        "moe_intermediate_size": 17,
    },
    "glm4_moe, odd": {**_THREE_HEADS, **_ODD, **_SIX},
    "glm4_moe_lite, odd": {"attention_bias": True, **_ODD},
    "gpt_oss, one key head": {**_ONE_KEY_HEAD, "intermediate_size": 48},
    "gpt_oss, three heads": {**_THREE_HEADS, "intermediate_size": 19},
    "lfm2, adjusted": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 24},
    "lfm2_moe, biases": {
        "conv_bias": True,
        "conv_L_cache": 4,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": True,
        "num_experts": 7,
    },
    "llama, odd": {**_THREE_HEADS, **_ODD, "attention_bias": True, "mlp_bias": False},
    "minimax_m2, one key head": {
        **_ONE_KEY_HEAD,
        "intermediate_size": 19,
        "num_local_experts": 7,
    },
    "minimax_m2, nine heads": {**_NINE_HEADS, "vocab_size": 99},
    "mixtral, one key head": {**_ONE_KEY_HEAD, "intermediate_size": 51},
    "mixtral, odd": {**_THREE_HEADS, "hidden_size": 45, "vocab_size": 91},
    "mixtral, a window": {"sliding_window": 24, "num_experts_per_tok": 9},
    "olmoe, five heads": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 80,
    },
    "olmoe, three heads": {**_THREE_HEADS, "hidden_size": 48},
    "qwen2_moe, five heads": {"num_attention_heads": 5, "num_key_value_heads": 1},
    "qwen2_moe, odd": {
        **_THREE_HEADS,
        **_ODD,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 33,
    },
    "qwen3_moe, one key head": {**_ONE_KEY_HEAD, "attention_bias": True, "num_experts": 7},
    "qwen3_moe, odd": {**_THREE_HEADS, **_ODD, "moe_intermediate_size": 33},
    "qwen3_moe, tied": {**_NINE_HEADS, "tie_word_embeddings": True, "vocab_size": 97},
    "qwen3_moe, dense layers": {**_ONE_KEY_HEAD, "mlp_only_layers": [0, 2]},
}
# Each size of a head is a kernel to compile on the CPU, where 16 stands for all of them.
_HEADS: dict[str, dict[str, Any]] = {
    **{f"qwen3_moe, heads of {D}": {**_THREE_HEADS, "head_dim": D} for D in (8, 24, 40, 48, 80)},
    "deepseek_v3, latents of 40": {
        "q_lora_rank": 48,
        "kv_lora_rank": 40,
        "qk_rope_head_dim": 24,
    },
}


def _rows(named: dict[str, dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name, which begins with the family: its `model_type`, and its configuration."""
    families = {name: name.partition(",")[0] for name in named}
    return {name: (of, {**_SIZES, **_PLAIN[of], **named[name]}) for name, of in families.items()}


PLAIN = _rows({family: {} for family in _PLAIN})
VARIANTS, HEADS = _rows(_VARIANTS), _rows(_HEADS)
ROWS = {**PLAIN, **VARIANTS, **HEADS}
"""``PLAIN``: one of each family; ``HEADS``: for devices that compile nothing for a head."""

_INPUTS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    "v_head_dim",
)
WRONG_HEADS = ("qwen3_moe, heads of 8", "deepseek_v3, latents of 40")
REFUSED = [
    *WRONG_HEADS,
    *(
        name
        for name, (_, config) in ROWS.items()
        if any((config.get(size) or 0) % 8 for size in _INPUTS)
    ),
]
"""Rows that no GPU takes: for their heads, or for matrices with inputs in no multiples of 8."""
