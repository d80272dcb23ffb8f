"""Tiny random models written as GGUF files are, by the package ``gguf`` and its table of names.

Sizes are multiples of 256, as K-quants want them. What is stored is dequantized by the package and
put back into transformers' own model, which is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from pykernels.quant import get_format

from ... import tiny
from ...checks import byte_tokenizer
from ...tiny_quantized import E2M1
from . import delta_nets

Type = gguf.GGMLQuantizationType
TypeOf = Callable[[str], Type]
Tensors = dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], object]]]
"""By the file's names: what is stored, and what puts its values back into the model."""

ARCHS = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma4_text": "gemma4",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "shared_expert_intermediate_size": 256,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "global_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_key_head_dim": 64,
}
_GEMMA4 = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""Names that the package has not: llama.cpp's loader has."""
DELTA_NETS = ("qwen3next", "qwen35moe")
ROPE = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def mixed(name: str) -> Type:
    """As `llama-quantize` writes Q4_K_M, where a matrix can have it."""
    if "attn_v.weight" in name or "ffn_down" in name or name == "output.weight":
        return Type.Q6_K
    return Type.Q8_0 if "k_b" in name or "token_embd" in name else Type.Q4_K


def blocks_of_32(name: str) -> Type:
    """As it writes Q4_K_M where K is no multiple of 256, and then some."""
    kinds = {"down": Type.Q5_1, "attn": Type.Q5_0, "exps": Type.Q4_1, "shexp": Type.Q4_0}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q8_0)


def low_bits(name: str) -> Type:
    """As files of about 3 bits a weight mix their types."""
    kinds = {"down_exps": Type.Q3_K, "exps": Type.Q2_K, "attn": Type.IQ4_XS}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q6_K)


def by_grids(name: str) -> Type:
    """As files of less than 3.5 bits a weight: codes are points of grids."""
    kinds = {"down_exps": Type.IQ3_S, "exps": Type.IQ2_XXS, "attn": Type.IQ3_XXS}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q6_K)


def by_trits(name: str) -> Type:
    """As files of less than 2 bits a weight."""
    kinds = {"down_exps": Type.IQ1_M, "exps": Type.IQ1_S, "attn": Type.TQ1_0, "output": Type.TQ2_0}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q6_K)


def unlike(name: str) -> Type:
    """As a file for which each tensor's type was chosen: gate and up differ, of experts, of a
    shared one and of dense layers."""
    kinds = {"ffn_gate_inp": Type.F32, "ffn_gate": Type.Q4_K, "ffn_up": Type.Q6_K}
    return next((kind for part, kind in kinds.items() if part in name), Type.Q8_0)


def nvfp4(name: str) -> Type:
    return Type.NVFP4 if "_exps" in name or "attn_q" in name else Type.Q8_0


def gpt_oss(name: str) -> Type:
    return Type.MXFP4 if "exps" in name else Type.Q8_0


def all_of(kind: Type) -> TypeOf:
    return lambda name: kind


def write(
    path: Path,
    model_type: str,
    type_of: TypeOf = mixed,
    *,
    split_kv_b: bool = True,
    files: int = 1,
    prepare: Callable[[PreTrainedModel], object] = lambda model: None,
    change: Callable[[Tensors], object] = lambda stored: None,
    values: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> PreTrainedModel:
    """Writes a random model; returns transformers' own with the values that are stored.

    `prepare` changes the model first, `change` what is stored; `values`: other metadata, None for
    a key that is left out.
    """
    own = dict(SIZES)
    if model_type.startswith("deepseek"):
        own["head_dim"] = own["qk_rope_head_dim"]
    model = tiny.build(model_type, **{**own, **config})
    prepare(model)
    arch, cfg = ARCHS[model_type], model.config
    stored = _stored(model, split_kv_b)
    change(stored)
    size = {"split_max_tensors": -(-len(stored) // files)} if files > 1 else {}
    writer = gguf.GGUFWriter(path, arch, **size)
    _metadata(writer, arch, cfg)
    _tokenizer(writer)
    for key, value in values.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kind_of = gguf.GGUFValueType.get_type(value)
            whole = gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, whole if type(value) is int else kind_of)
    for name, (tensor, put) in stored.items():
        exact = any(part in name for part in ("gate_inp", "conv1d", "shortconv.conv"))
        kind = Type.F32 if exact or tensor.ndim < 2 else type_of(name)
        data, scale = _quantized(tensor, kind), torch.ones(())
        writer.add_tensor(name, data, raw_dtype=kind)
        if kind is Type.NVFP4:  # a second scale a matrix
            seeded = torch.Generator().manual_seed(len(stored))
            scale = torch.rand(len(tensor) if tensor.ndim == 3 else 1, generator=seeded) + 0.5
            writer.add_tensor(name.replace(".weight", ".scale"), scale.numpy())
            scale = scale.view(-1, *[1] * (tensor.ndim - 1))
        found = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(tensor.shape)
        put(found * scale)
    if cfg.rope_parameters.get("rope_type") == "llama3":
        turned: Any = model.model.rotary_emb
        D = 2 * len(turned.inv_freq)
        plain = cfg.rope_parameters["rope_theta"] ** (-torch.arange(0, D, 2) / D)
        writer.add_tensor("rope_freqs.weight", (plain / turned.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _stored(model: PreTrainedModel, split_kv_b: bool) -> Tensors:
    cfg, arch = model.config, ARCHS[model.config.model_type]
    table = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), cfg.num_hidden_layers
    )
    found = {}
    for name, tensor in model.state_dict().items():
        if "lm_head" in name and cfg.tie_word_embeddings:
            continue
        if arch in DELTA_NETS and delta_nets.changes(name):
            for key, value, put in delta_nets.stored(name, tensor, cfg, arch == "qwen35moe"):
                own = table.get_name(key, try_suffixes=(".weight", ".bias"))
                assert own is not None, key
                found[own] = value.contiguous(), put
            continue
        for key, part in _parts(name, tensor, cfg, split_kv_b):
            stored = table.get_name(key, try_suffixes=(".weight", ".bias"))
            layer, _, leaf = key.removeprefix("model.layers.").partition(".")
            stored = f"blk.{layer}.{_GEMMA4[leaf]}" if leaf in _GEMMA4 else stored
            assert stored is not None, key
            permuted = 0
            if arch == "llama":
                heads = {"q_proj": cfg.num_attention_heads, "k_proj": cfg.num_key_value_heads}
                permuted = next((heads[p] for p in heads if p in key), 0)
            value, put = part, part.copy_
            if permuted:
                value = _turned(part, permuted)
                put = lambda v, p=part, h=permuted: p.copy_(_turned_back(v, h))  # noqa: E731
            elif key.endswith("shared_expert_gate.weight"):
                value, put = part[0], lambda v, p=part: p.copy_(v[None])
            elif key.endswith("conv.conv.weight"):
                value, put = part[:, 0], lambda v, p=part: p.copy_(v[:, None])
            found[stored] = value.contiguous(), put
    return found


def _parts(
    name: str, tensor: torch.Tensor, cfg: Any, split_kv_b: bool
) -> list[tuple[str, torch.Tensor]]:
    """One of transformers' tensors under the names that the package's table has."""
    if cfg.model_type == "gemma4_text" and "experts." in name:
        return [(f"{name}.weight", tensor)]
    if name.endswith("layer_scalar"):
        return [(f"{name}.weight", tensor)]
    if name.endswith("experts.gate_up_proj"):
        base, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        return [
            (f"{base}gate_proj.weight", tensor[:, :half]),
            (f"{base}up_proj.weight", tensor[:, half:]),
        ]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", tensor)]
    if name.endswith("kv_b_proj.weight") and split_kv_b:
        nope = cfg.qk_nope_head_dim
        heads = tensor.view(cfg.num_attention_heads, nope + cfg.v_head_dim, -1)
        return [
            (name.replace("kv_b", "k_b"), heads[:, :nope].transpose(1, 2)),
            (name.replace("kv_b", "v_b"), heads[:, nope:]),
        ]
    if name.endswith("moe_statics.e_score_correction_bias"):  # [1, E]
        base = name.replace(".gate.moe_statics", ".moe_statics")
        return [(base.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if name.endswith("expert_bias"):
        return [(f"{name}.bias", tensor)]
    return [(name, tensor)]


def _turned(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a head's rows: pairs that turn together side by side."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _turned_back(rows: torch.Tensor, heads: int) -> torch.Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _quantized(tensor: torch.Tensor, kind: Type) -> Any:
    """By the package, or in the K-quants and IQ types that it only dequantizes by ours."""
    if kind is Type.NVFP4:
        return _nvfp4(tensor.float())
    if not kind.name.startswith("IQ") and not kind.name.endswith("_K"):
        return gguf.quants.quantize(tensor.float().numpy(), kind)
    matrix = tensor.float().flatten(0, -2).contiguous()
    rows = get_format(kind.name.lower()).quantize(matrix).data
    return rows.view(*tensor.shape[:-1], -1).numpy()


def _nvfp4(tensor: torch.Tensor) -> Any:
    """Blocks of 4 scales and 64 codes: of each 16, input i lies below i + 8."""
    groups = tensor.reshape(*tensor.shape[:-1], -1, 4, 16)
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    steps = groups / scale.float().clamp(min=2.0**-9)[..., None]
    code = (steps.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (steps < 0)
    both = (code[..., :8] | code[..., 8:] << 4).to(torch.uint8).flatten(-2)
    return torch.cat((scale.view(torch.uint8), both), dim=-1).flatten(-2).numpy()


def _metadata(w: gguf.GGUFWriter, arch: str, cfg: Any) -> None:
    """As llama.cpp's converter writes it."""
    if arch == "gemma4":
        _gemma4(w, cfg)
        return
    head = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    w.add_block_count(cfg.num_hidden_layers)
    w.add_context_length(cfg.max_position_embeddings)
    w.add_embedding_length(cfg.hidden_size)
    if arch not in DELTA_NETS:
        w.add_feed_forward_length(cfg.intermediate_size)
    w.add_head_count(cfg.num_attention_heads)
    w.add_layer_norm_rms_eps(cfg.norm_eps if arch.startswith("lfm2") else cfg.rms_norm_eps)
    w.add_rope_freq_base(cfg.rope_parameters["rope_theta"])
    counts = "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
    if experts := next((n for name in counts if (n := getattr(cfg, name, None))), None):
        w.add_expert_count(experts)
        w.add_expert_used_count(getattr(cfg, "moe_k", None) or cfg.num_experts_per_tok)
        if cfg.model_type != "mixtral":
            w.add_expert_feed_forward_length(cfg.moe_intermediate_size)
    if arch in DELTA_NETS:
        w.add_ssm_conv_kernel(cfg.linear_conv_kernel_dim)
        w.add_ssm_state_size(cfg.linear_key_head_dim)
        w.add_ssm_group_count(cfg.linear_num_key_heads)
        w.add_ssm_time_step_rank(cfg.linear_num_value_heads)
        w.add_ssm_inner_size(cfg.linear_num_value_heads * cfg.linear_value_head_dim)
        recurrent = [kind == "linear_attention" for kind in cfg.layer_types]
        w.add_array(f"{arch}.attention.recurrent_layers", recurrent)
    if arch in ("qwen2moe", *DELTA_NETS):
        w.add_expert_shared_feed_forward_length(cfg.shared_expert_intermediate_size)
    if arch == "ernie4_5-moe":
        w.add_interleave_moe_layer_step(cfg.moe_layer_interval)
        w.add_leading_dense_block_count(cfg.moe_layer_start_index)
        w.add_expert_shared_count(cfg.moe_num_shared_experts)
    if arch == "deepseek2":
        nope, rotary = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
        w.add_head_count_kv(1)
        w.add_q_lora_rank(cfg.q_lora_rank)
        w.add_kv_lora_rank(cfg.kv_lora_rank)
        w.add_key_length(cfg.kv_lora_rank + rotary)
        w.add_value_length(cfg.kv_lora_rank)
        w.add_key_length_mla(nope + rotary)
        w.add_value_length_mla(cfg.v_head_dim)
        w.add_rope_dimension_count(rotary)
    elif arch.startswith("lfm2"):
        kinds = {"conv": 0, "full_attention": cfg.num_key_value_heads}
        w.add_head_count_kv([kinds[kind] for kind in cfg.layer_types])
        w.add_shortconv_l_cache(cfg.conv_L_cache)
        if arch == "lfm2moe":
            w.add_leading_dense_block_count(cfg.num_dense_layers)
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        w.add_head_count_kv(cfg.num_key_value_heads)
        w.add_key_length(head)
        w.add_value_length(head)
        w.add_rope_dimension_count(int(head * cfg.rope_parameters.get("partial_rotary_factor", 1)))
    if arch in ("deepseek2", "glm4moe"):
        sigmoid = cfg.model_type != "deepseek_v2"
        gating = gguf.ExpertGatingFuncType
        w.add_expert_gating_func(gating.SIGMOID if sigmoid else gating.SOFTMAX)
        w.add_leading_dense_block_count(cfg.first_k_dense_replace)
        w.add_expert_shared_count(cfg.n_shared_experts)
        w.add_expert_weights_scale(cfg.routed_scaling_factor)
        w.add_expert_weights_norm(sigmoid and cfg.norm_topk_prob)
        w.add_expert_group_count(cfg.n_group)
        w.add_expert_group_used_count(cfg.topk_group)
    if cfg.rope_parameters.get("rope_type") == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(cfg.rope_parameters["factor"])
        w.add_rope_scaling_orig_ctx_len(cfg.rope_parameters["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_log_mul(0.1 * cfg.rope_parameters["mscale_all_dim"])


def _gemma4(w: gguf.GGUFWriter, cfg: Any) -> None:
    """Layers with heads of their own."""
    each = [cfg.per_layer_config[i] for i in range(cfg.num_hidden_layers)]
    windowed = [kind == "sliding_attention" for kind in cfg.layer_types]
    local, full = (each[windowed.index(which)].head_dim for which in (True, False))
    w.add_block_count(cfg.num_hidden_layers)
    w.add_context_length(cfg.max_position_embeddings)
    w.add_embedding_length(cfg.hidden_size)
    w.add_feed_forward_length(cfg.intermediate_size)
    w.add_head_count(cfg.num_attention_heads)
    w.add_head_count_kv([one.num_key_value_heads for one in each])
    w.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    w.add_rope_freq_base(cfg.rope_parameters["full_attention"]["rope_theta"])
    w.add_rope_freq_base_swa(cfg.rope_parameters["sliding_attention"]["rope_theta"])
    for add, size in (
        (w.add_key_length, full),
        (w.add_value_length, full),
        (w.add_rope_dimension_count, full),
        (w.add_key_length_swa, local),
        (w.add_value_length_swa, local),
        (w.add_rope_dimension_count_swa, local),
    ):
        add(size)
    w.add_sliding_window(cfg.sliding_window)
    w.add_sliding_window_pattern(windowed)
    w.add_shared_kv_layers(0)
    w.add_embedding_length_per_layer_input(0)
    w.add_final_logit_softcapping(cfg.final_logit_softcapping)
    w.add_expert_count(cfg.num_experts)
    w.add_expert_used_count(cfg.top_k_experts)
    w.add_expert_feed_forward_length(cfg.moe_intermediate_size)
    turned = cfg.rope_parameters["full_attention"]["partial_rotary_factor"] * full / 2
    factors = [1.0 if i < turned else 1e30 for i in range(full // 2)]
    w.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _tokenizer(w: gguf.GGUFWriter) -> None:
    tokens = [t for t, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda pair: pair[1])]
    tokens[tokens.index("|")] = "zz"  # so that there is something to merge
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_merges(["z z"])
    w.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    w.add_add_bos_token(True)
    w.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}{% endfor %}")
