"""llama.cpp's names of tensors -> those of transformers' models."""

from __future__ import annotations

import re

from .metadata import Metadata

_BLOCK = re.compile(
    r"blk\.(?P<layer>\d+)\.(?P<part>\w+)(?:\.(?P<what>weight|bias|scale|input_scale))?"
)

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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

_OTHERS: dict[str, dict[str, str]] = {
    "qwen2moe": {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
    },
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
    "ernie4_5-moe": {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    "minimax-m2": {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
}
"""Where an architecture names a part otherwise than the rest."""

_PERMUTED = ("attn_q", "attn_k")
"""llama's rows are in another order: it rotates neighbours, the model what is half a head apart."""


def model_name(name: str, architecture: str) -> str:
    """The model's name of a tensor; an unknown one stays as it is."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        return re.sub(r"^blk\.(\d+)\.", r"model.layers.\1.", name)
    layer, part, what = match["layer"], match["part"], match["what"]
    others = _OTHERS.get(architecture, {})
    ending = f"{part}.{what}"
    if whole := others.get(ending) or _WHOLE.get(ending):
        return f"model.layers.{layer}.{whole}"
    inner = others.get(part) or _PARTS.get(part, part)
    whole = "_scale_2"  # of NVFP4, as ModelOpt calls it
    if ".experts." in inner and what != "input_scale":
        endings = {"bias": "_bias", "scale": whole}
        return f"model.layers.{layer}.{inner}{endings.get(what, '')}"
    if what == "scale":
        what = f"weight{whole}"
    return f"model.layers.{layer}.{inner}.{what}"


def heads_of(name: str, meta: Metadata) -> int | None:
    """The heads in each of which a tensor's rows are permuted; None if they are not."""
    match = _BLOCK.fullmatch(name)
    if meta.architecture != "llama" or match is None or match["part"] not in _PERMUTED:
        return None
    if match["what"] not in ("weight", "bias"):
        return None
    heads: int = meta.count("attention.head_count")
    return heads if match["part"] == "attn_q" else meta.count("attention.head_count_kv", heads)
