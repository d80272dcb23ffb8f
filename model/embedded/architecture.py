"""The model's configuration: DeepSeek-V3 in small, and a tiny one that tests train in seconds.

The keys are those of DeepSeek-V3's own config.json; transformers' `DeepseekV3Config` reads them.
`kv_lora_rank + qk_rope_head_dim` is no multiple of 128 on purpose: the last FP8 block of
`kv_a_proj_with_mqa` is ragged, as the 576 rows of the real model make it.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from .tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE

FP8_BLOCK = 128

_EMBEDDED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

_TINY: dict[str, Any] = _EMBEDDED | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 128,
}

SIZES: dict[str, dict[str, Any]] = {"embedded": _EMBEDDED, "tiny": _TINY}


def quantization_config() -> dict[str, Any]:
    """The `quantization_config` of DeepSeek's FP8 checkpoints."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }


def build_model(
    settings: dict[str, Any], dtype: torch.dtype, experts: str = "eager"
) -> PreTrainedModel:
    """A randomly initialised transformers model of `settings` (a config.json's keys) on the CPU.

    `experts` is transformers' `experts_implementation`. The rotary frequencies and the router's
    `e_score_correction_bias` stay float32 whatever `dtype` is.
    """
    plain = {k: v for k, v in settings.items() if k not in ("quantization_config", "model_type")}
    config = DeepseekV3Config(**plain)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa", experts_implementation=experts
    )
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != torch.float32:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.float())
    frequencies = model.model.rotary_emb.inv_freq
    R = config.qk_rope_head_dim
    exponents = torch.arange(0, R, 2, dtype=torch.float32, device="cpu") / R
    torch.testing.assert_close(frequencies, settings["rope_theta"] ** -exponents)
    return model
