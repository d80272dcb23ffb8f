"""Configurations of well-known models by name, as data."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from pykernels.errors import PykernelsError

_MLA: dict[str, Any] = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
_DEEPSEEK: dict[str, Any] = {
    **_MLA,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
}
ARCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_hidden_layers": 32,
            "max_position_embeddings": 32768,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "vocab_size": 102400,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 27,
            "max_position_embeddings": 32768,
        },
    ),
    "deepseek-v2.5": (
        "deepseek_v2",
        {
            **_MLA,
            "hidden_size": 5120,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12288,
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "n_group": 8,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "vocab_size": 102400,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 60,
        },
    ),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK),
    "kimi-k2": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "vocab_size": 163840,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen2-57b": (
        "qwen2_moe",
        {
            "hidden_size": 3584,
            "moe_intermediate_size": 2560,
            "intermediate_size": 18944,
            "shared_expert_intermediate_size": 20480,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "num_hidden_layers": 28,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3-235b": (
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12288,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_hidden_layers": 94,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "glm-4.5": (
        "glm4_moe",
        {
            "hidden_size": 5120,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12288,
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "vocab_size": 151552,
            "num_hidden_layers": 92,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma4-26b": (
        "gemma4_text",
        {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 30,
            "max_position_embeddings": 262144,
        },
    ),
    "gpt-oss-120b": ("gpt_oss", {}),
    "lfm2-8b": (
        "lfm2_moe",
        {
            "num_hidden_layers": 24,
            "layer_types": [
                "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
            ],
        },
    ),
    "qwen3-next-80b": ("qwen3_next", {"max_position_embeddings": 262144}),
    "qwen3.6-35b": (
        "qwen3_5_moe_text",
        {"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 262144},
    ),
}
"""Shapes by name: the ``model_type`` and the settings that differ from its defaults."""

RELEASED: dict[str, tuple[str, str]] = {
    "deepseek-v3": ("fp8", "fp8"),
    "gpt-oss-120b": ("bf16", "mxfp4"),
    "kimi-k2": ("fp8", "fp8"),
}
"""Formats of linears and of experts in the checkpoints that are published; bfloat16 elsewhere."""


def make_config(arch: str, **changes: Any) -> PretrainedConfig:
    """The configuration of one of ``ARCHS``; ``changes`` that are None are left out.

    Raises:
        PykernelsError: there is none of that name.
    """
    if arch not in ARCHS:
        raise PykernelsError(f"there is no architecture {arch!r}", f"Use {', '.join(ARCHS)}")
    model_type, settings = ARCHS[arch]
    given = {key: value for key, value in changes.items() if value is not None}
    settings = settings | given
    if kinds := settings.get("layer_types"):
        layers = settings["num_hidden_layers"]
        settings["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    config = CONFIG_MAPPING[model_type](**settings)
    config.architectures = []
    return config
