"""llama.cpp's names of tensors -> those of transformers' models, and what else its converter
changes of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from .metadata import Metadata

_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<rest>.+)")

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # LFM2's last one
    "output.scale": "lm_head.weight_scale_2",
    "output.input_scale": "lm_head.input_scale",
    # Factors of llama 3's frequencies: `config` reads them, no parameter of the model is made.
    "rope_freqs.weight": "model.rotary_emb.inv_freq",
}

_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # Instead of kv_b: [heads, L, nope], already transposed, and [heads, dv, L].
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",  # [E, I, H]
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",  # [E, H, I]
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",  # [E, 2 I, H], instead of two
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_WHOLE = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
}
"""Names that lose their ending."""

_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
}
_GEMMA4 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    **{f"ffn_{p}_exps": f"experts.{p}_proj" for p in ("gate", "up", "down", "gate_up")},
}
_SHARED_GATED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
}
_DELTA_NET = {
    **_SHARED_GATED,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Gated delta nets, whose queries, keys and values are `attn_qkv`; `fused` cuts that of attention
before names are looked up."""

_OTHERS: dict[str, dict[str, str]] = {
    "gemma4": _GEMMA4,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "qwen2moe": _SHARED_GATED,
    "qwen3next": {
        **_DELTA_NET,
        "ssm_in": "linear_attn.in_proj_qkvz",  # the first files', instead of attn_qkv and attn_gate
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    "qwen35moe": {
        **_DELTA_NET,
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    },
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
    "ernie4_5-moe": {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    "minimax-m2": {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
}
"""Where an architecture names a part otherwise than the rest."""

DELTA_NETS = ("qwen3next", "qwen35moe")
"""Architectures with gated delta nets."""

_PERMUTED = ("attn_q", "attn_k")
"""llama's rows are in another order: it rotates neighbours, the model what is half a head apart."""

_LESS_ONE = re.compile(
    r"output_norm\.weight|blk\.\d+\.(attn|post_attention|attn_q|attn_k)_norm\.weight"
)
_RATES = re.compile(r"blk\.\d+\.ssm_a")


def model_name(name: str, architecture: str) -> str:
    """The model's name of a tensor; an unknown one stays as it is."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, rest = match["layer"], match["rest"]
    part, _, what = rest.rpartition(".")
    others = _OTHERS.get(architecture, {})
    if whole := others.get(rest) or _WHOLE.get(rest):
        return f"model.layers.{layer}.{whole}"
    if what not in ("weight", "bias", "scale", "input_scale"):
        return f"model.layers.{layer}.{rest}"
    inner = others.get(part) or _PARTS.get(part, part)
    whole = "_scale_2"  # of NVFP4, as ModelOpt calls it
    if ".experts." in f".{inner}" and what != "input_scale":
        endings = {"bias": "_bias", "scale": whole}
        return f"model.layers.{layer}.{inner}{endings.get(what, '')}"
    if what == "scale":
        what = f"weight{whole}"
    return f"model.layers.{layer}.{inner}.{what}"


def heads_of(name: str, meta: Metadata) -> int | None:
    """The heads in each of which a tensor's rows are permuted; None if they are not."""
    match = _LAYER.fullmatch(name)
    part, _, what = ("" if match is None else match["rest"]).rpartition(".")
    if meta.architecture != "llama" or part not in _PERMUTED or what not in ("weight", "bias"):
        return None
    heads: int = meta.count("attention.head_count")
    return heads if part == "attn_q" else meta.count("attention.head_count_kv", heads)


def change_of(name: str, architecture: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes the model's numbers of a stored tensor; None if they are the same.

    Norms of models with gated delta nets are stored with their 1, but for those that the model has
    with it; decays as rates, of which it has the logarithm.
    """
    if architecture not in DELTA_NETS:
        return None
    if _LESS_ONE.fullmatch(name):
        return lambda stored: stored.float() - 1
    if _RATES.fullmatch(name):
        return lambda stored: stored.float().neg().log()
    return None
