"""Every hyperparameter that llama.cpp reads for the architectures of `families`, and what becomes
of each: it is read, it does not change the forward, or other values than these are refused.

Source: llama.cpp, ``llama_model_base::load_hparams`` in src/llama-model.cpp, and
``load_arch_hparams`` in src/models/. Keys that llama.cpp does not read for an architecture may have
any value, but those of `ELSEWHERE`: with them the file asks for another forward than its
architecture's.
"""

from __future__ import annotations

from typing import Any

from .metadata import Metadata

READ, ANY = "read", "any value"
Table = dict[str, Any]
"""Accepted values by key: READ, ANY, or a tuple of them."""

_OFF = (0, 1)
"""The values of a factor that scales nothing: llama.cpp takes 0 as "not scaled"."""

COMMON: Table = {
    "vocab_size": ANY,  # the embedding's rows say it
    "context_length": READ,
    "embedding_length": READ,
    "embedding_length_out": ANY,  # embedding models'
    "block_count": READ,
    "nextn_predict_layers": READ,
    "feed_forward_length": READ,
    "expert_count": READ,
    "expert_used_count": READ,
    "expert_group_count": _OFF,
    "expert_group_used_count": ANY,  # of one group
    "pooling_type": ANY,  # embedding models'
    "classifier.output_labels": ANY,  # rerankers'
    "attention.head_count": READ,
    "attention.head_count_kv": READ,
    "attention.key_length": READ,
    "attention.value_length": READ,
    "attention.layer_norm_rms_epsilon": READ,
    "attention.causal": (True,),
    "rope.dimension_count": READ,
    "rope.freq_base": READ,
    "rope.scaling.type": READ,
    "rope.scaling.factor": READ,
    "rope.scale_linear": READ,
    "rope.scaling.original_context_length": READ,
    "rope.scaling.yarn_beta_fast": READ,
    "rope.scaling.yarn_beta_slow": READ,
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.finetuned": ANY,  # printed
}

_SOFTMAX: Table = {"expert_gating_func": (0, 1)}
_SIGMOID: Table = {"expert_gating_func": (0, 2)}
_ROUTED: Table = {
    "leading_dense_block_count": READ,
    "expert_feed_forward_length": READ,
    "expert_shared_count": READ,
    "expert_weights_scale": READ,
    "expert_weights_norm": READ,
    "expert_group_count": READ,
    "expert_group_used_count": READ,
}

_DELTA_NET: Table = {
    **_SOFTMAX,
    "expert_weights_norm": (True,),
    "expert_feed_forward_length": READ,
    "expert_shared_feed_forward_length": READ,
    "expert_shared_count": ANY,  # the tensors' shapes say it
    "ssm.conv_kernel": READ,
    "ssm.inner_size": READ,
    "ssm.state_size": READ,
    "ssm.time_step_rank": READ,
    "ssm.group_count": READ,
    "attention.recurrent_layers": READ,
    "full_attention_interval": READ,
}

OWN: dict[str, Table] = {
    "llama": {**_SOFTMAX, "expert_weights_norm": (True,)},
    "qwen2moe": {
        **_SOFTMAX,
        "expert_weights_norm": (False,),
        "expert_feed_forward_length": READ,
        "expert_shared_feed_forward_length": READ,
    },
    "qwen3moe": {
        **_SOFTMAX,
        "expert_weights_norm": (True,),
        "expert_feed_forward_length": READ,
    },
    "qwen3next": _DELTA_NET,
    # Sections of the rotation are those of pictures; of a text they all have one position.
    "qwen35moe": {**_DELTA_NET, "rope.dimension_sections": ANY},
    "deepseek2": {
        **_ROUTED,
        "expert_gating_func": READ,
        "attention.q_lora_rank": READ,
        "attention.kv_lora_rank": READ,
        "attention.key_length_mla": READ,
        "attention.value_length_mla": READ,
        "rope.scaling.yarn_log_multiplier": READ,
    },
    "glm4moe": {**_SIGMOID, **_ROUTED, "rope.dimension_sections": ANY},
    "gemma4": {
        **dict.fromkeys(("expert_feed_forward_length", "final_logit_softcapping"), READ),
        **{
            f"attention.{key}_length{end}": READ for key in ("key", "value") for end in ("", "_swa")
        },
        "attention.sliding_window": READ,
        "attention.sliding_window_pattern": READ,
        "rope.dimension_count_swa": READ,
        "rope.freq_base_swa": READ,
        "embedding_length_per_layer_input": (0,),  # of E2B and E4B
    },
    "gpt-oss": {
        "expert_feed_forward_length": READ,
        "attention.sliding_window": READ,
        "attention.sliding_window_pattern": READ,
    },
    "olmoe": {**_SOFTMAX, "expert_weights_norm": (False,), "attention.clamp_kqv": READ},
    "ernie4_5-moe": {
        **_SOFTMAX,
        "expert_weights_norm": (True,),
        "expert_feed_forward_length": READ,
        "expert_shared_count": READ,
        "expert_shared_feed_forward_length": ANY,  # the tensors' shapes say it
        "interleave_moe_layer_step": READ,
        "leading_dense_block_count": READ,
    },
    "dots1": {**_SIGMOID, **_ROUTED},
    "minimax-m2": {
        **_SIGMOID,
        "expert_weights_norm": (True,),
        "expert_feed_forward_length": READ,
    },
    "lfm2": {
        "shortconv.l_cache": READ,
        "attention.sliding_window": (0,),
        **dict.fromkeys(("expert_count", "expert_used_count"), ANY),  # all layers are dense
    },
    "lfm2moe": {
        **_SIGMOID,
        "shortconv.l_cache": READ,
        "leading_dense_block_count": READ,
        "expert_feed_forward_length": READ,
        "expert_weights_norm": (True,),
    },
}
"""Tables by ``general.architecture``, which override the others."""

ELSEWHERE: Table = {
    "logit_scale": _OFF,
    "embedding_scale": _OFF,
    "residual_scale": _OFF,
    "attention.scale": (0,),
    "attention.output_scale": _OFF,
    "attention.value_scale": _OFF,
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "expert_weights_scale": _OFF,
    "expert_group_scale": _OFF,
    "moe_latent_size": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
}

_LIKE = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
"""Keys of layers with a window, whose values must equal those of the other layers."""


def check(meta: Metadata) -> None:
    """Raises PykernelsError, with the key's name, for a value that changes the forward and is not
    read."""
    table = {**ELSEWHERE, **COMMON, **OWN[meta.architecture]}
    for key, accepted in table.items():
        value = meta.value(key)
        if accepted in (READ, ANY) or value is None:
            continue
        for one in value if isinstance(value, list) else [value]:
            if one not in accepted:
                raise meta.unsupported(key, value, " or ".join(map(str, accepted)))
    for key, plain in _LIKE.items():
        value = None if key in OWN[meta.architecture] else meta.value(key)
        if value is not None and value != meta.value(plain):
            raise meta.unsupported(key, value, f"that of {plain}")
