"""What KTransformers' rule files say, one row for each operator and its arguments.

Read from the 77 files in archive/*/ktransformers/optimize/optimize_rules of
github.com/kvcache-ai/ktransformers (28 November 2026); numbers of GPUs and regular expressions that
differ by layer alone are one row.
"""

from __future__ import annotations

from typing import Any


def at(device: str, **kwargs: Any) -> dict[str, Any]:
    return {"generate_device": device, "prefill_device": device, **kwargs}


def experts(layer: str, op: str = "KExpertsCPU", **kwargs: Any) -> dict[str, Any]:
    places = {"generate_device": "cpu", "prefill_device": layer, "out_device": layer}
    return {**places, "generate_op": op, "prefill_op": "KExpertsTorch", **kwargs}


def linear(device: str, op: str, prefill_op: str = "KLinearTorch") -> dict[str, Any]:
    return at(device, generate_op=op, prefill_op=prefill_op)


Row = tuple[str, dict[str, Any], str]

NAMES = {
    "RoPE": r"^model\.layers\.1\.",
    "gate": r"^model\.layers\.1\.mlp\.gate$",
    "experts": r"^model\.layers\..*\.mlp\.experts$",
    "linear": r"^model\.layers\.1\.(?!.*kv_b_proj).*$",
    "default": "^model.embed_tokens",
    "models": "^model$",
    "mlp": r"^model\.layers\.0\.mlp$",
}
"""How its files name the modules of an operator, by the first word of its path."""

ROTARY = (
    "KGlm4MoeRotaryEmbedding",
    "KQwen3MoeRotaryEmbedding",
    "KSmallthinkerRotaryEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingV3",
    "RotaryEmbeddingV4",
    "YarnRotaryEmbedding",
    "YarnRotaryEmbeddingV3",
)
NORMS = (
    "KGlm4MoeRMSNorm",
    "KQwen2MoeRMSNorm",
    "KQwen3MoeRMSNorm",
    "KQwen3NextRMSNorm",
    "KSmallthinkerRMSNorm",
    "RMSNorm",
)
BLOCKS = (
    "KDeepseekV2MoE",
    "KDeepseekV3MoE",
    "KDeepseekV3MoEV2",
    "KGlm4MoeMoE",
    "KQwen2MoeSparseMoeBlock",
    "KQwen2MoeSparseMoeBlockV2",
    "KQwen3MoeSparseMoeBlock",
    "KQwen3MoeSparseMoeBlockV2",
    "KQwen3NextSparseMoeBlockV2",
    "KSmallthinkerMoeBlock",
)
ATTENTION = (
    "attention.KDeepseekV2Attention",
    "attention.KLlamaAttention",
    "attention.KQwen3MoeAttention",
    "balance_serve_attention.KGlm4MoeAttention",
    "balance_serve_attention.KQwen2MoeAttention",
    "balance_serve_attention.KQwen3MoeAttention",
    "balance_serve_attention.flashinfer_attn",
)

ACCEPTED: list[Row] = [
    *((f"RoPE.{name}", at("cuda"), "rotary on cuda:0") for name in ROTARY),
    ("RoPE.RotaryEmbeddingV2", {}, ""),
    ("RoPE.YarnRotaryEmbedding", at("cpu"), "rotary on cpu"),
    ("RoPE.YarnRotaryEmbedding", at("cuda:1"), "rotary on cuda:1"),
    *((f"layernorm.{name}", at("cuda"), "norm on cuda:0") for name in NORMS),
    ("gate.KMoEGate", at("cuda:1"), "router on cuda:1"),
    ("gate.KMoEGate", at("cpu"), "router on cpu"),
    *((f"experts.{name}", at("cuda"), "block on cuda:0") for name in BLOCKS),
    ("experts.KDeepseekV2MoE", at("cpu"), "block on cpu"),
    ("experts.KMistralSparseMoEBlock", {}, ""),
    ("mlp.KGlm4MoeMLP", at("cuda"), "mlp on cuda:0"),
    ("mlp.KQwen2MoeMLP", at("cuda"), "mlp on cuda:0"),
    ("mlp.kDeepseekV3MLP", at("cuda"), "mlp on cuda:0"),
    ("models.KDeepseekV2Model", {"per_layer_prefill_intput_threshold": 0}, ""),
    ("models.KQwen2MoeModel", {"per_layer_prefill_intput_threshold": 0}, ""),
    ("models.KQwen3MoeModel", {"per_layer_prefill_intput_threshold": 0}, ""),
    ("models.KLlamaModel", at("cuda", per_layer_prefill_intput_threshold=0), "model on cuda:0"),
    (
        "models.KDeepseekV2Model",
        {"per_layer_prefill_intput_threshold": 0, "transfer_map": {1: "cuda:1"}},
        "attention on cuda:1",
    ),
    *((name, at("cuda"), "placed on cuda:0") for name in ATTENTION),
    ("attention.KDeepseekV2Attention", at("cpu"), "placed on cpu"),
    (
        "attention.KDeepseekV2Attention",
        at("cuda:1", absorb_for_prefill=False),
        "placed on cuda:1",
    ),
    (
        "balance_serve_attention.flashinfer_attn",
        at("cuda", absorb_for_prefill=False),
        "placed on cuda:0",
    ),
    ("default", at("cpu"), "placed on cpu"),
    ("default", at("cuda:1"), "placed on cuda:1"),
    ("linear.KTransformersLinear", linear("cuda", "KLinearMarlin"), "int4 on cuda:0"),
    ("linear.KTransformersLinear", linear("cuda:1", "KLinearMarlin"), "int4 on cuda:1"),
    ("linear.KTransformersLinear", linear("cuda", "VLinearMarlin"), "int4 on cuda:0"),
    ("linear.KTransformersLinear", linear("cuda", "KLinearFP8"), "fp8 on cuda:0"),
    ("linear.KTransformersLinear", linear("cuda", "KLinearQ8"), "int8 on cuda:0"),
    ("linear.KTransformersLinear", linear("cuda", "KLinearTorch"), "auto on cuda:0"),
    (
        "linear.KTransformersLinear",
        {**linear("cpu", "KLinearCPUInfer"), "out_device": "cpu"},
        "auto on cpu",
    ),
    ("experts.KTransformersExperts", experts("cuda"), "auto on cpu, experts on cuda:0"),
    ("experts.KTransformersExperts", experts("cuda:1"), "auto on cpu, experts on cuda:1"),
    ("experts.KTransformersExperts", experts("cpu"), "auto on cpu, experts on cpu"),
    (
        "experts.KTransformersExperts",
        experts("cuda", backend="AMXInt8"),
        "int8 on cpu, experts on cuda:0",
    ),
    (
        "experts.KTransformersExpertsV2",
        experts("cuda", backend="AMXBF16"),
        "bf16 on cpu, experts on cuda:0",
    ),
    (
        "experts.KTransformersExpertsV2",
        experts("cuda", backend="llamafile"),
        "auto on cpu, experts on cuda:0",
    ),
    (
        "experts.KGlm4Experts",
        experts("cuda", prefill_op="None"),
        "auto on cpu, experts on cuda:0",
    ),
]
"""Operator, its arguments, what becomes of the rule: formats and places, or parts to be checked."""

REFUSED: list[Row] = [
    *(
        (name, at(device), f"no generate_device '{device}'. Write cpu, cuda, or cuda:0")
        for device in ("xpu", "xpu:0", "npu", "npu:0")
        for name in ("RoPE.RotaryEmbedding", "gate.KMoEGate", "attention.KDeepseekV2Attention")
    ),
    ("models.KDeepseekV2Model", {"device": "xpu"}, "no device 'xpu'"),
    ("experts.KTransformersExperts", experts("xpu"), "no prefill_device 'xpu'"),
    (
        "experts.KTransformersExperts",
        {"generate_device": "cuda:1", "generate_op": "KExpertsMarlin"},
        "no generate_device 'cuda:1'. Drop the rule and give --experts gpu, or write cpu",
    ),
    (
        "experts.KTransformersExperts",
        experts("cuda", "KSFTExpertsCPU"),
        "no generate_op 'KSFTExpertsCPU'. Use KExpertsCPU",
    ),
    (
        "experts.KTransformersExperts",
        {**experts("cuda"), "prefill_device": "cpu"},
        "no prefill_device 'cpu'. Its out_device is cuda:0. Drop it and give --prefill cpu",
    ),
    (
        "linear.KTransformersLinear",
        {**linear("cpu", "KLinearCPUInfer"), "prefill_device": "cuda"},
        "KTransformersLinear is on cpu and cuda:0",
    ),
    (
        "linear.KTransformersLinear",
        linear("cuda", "KLinearIPEXLLM", "KLinearIPEXLLM"),
        "no generate_op 'KLinearIPEXLLM'. Use KLinearMarlin",
    ),
    *(
        (name, at("cuda"), f"there is no operator 'ktransformers.operators.{name}'")
        for name in (
            "ascend.ascend_attention.KDeepseekV2AttentionW8A8A2",
            "ascend.ascend_experts.KDeepseekV3MoEW8A8",
            "balance_serve_attention.KQwen3NextGatedDeltaNet",
            "balance_serve_attention.KSmallthinkerAttention",
            "experts.KSmallthinkerExperts",
            "gate.KMoEGateIPEXLLM",
            "layernorm.KDeepseekRMSNormIPEXLLM",
            "mlp.KSmallthinkerDenseMlpBlock",
        )
    ),
]
"""The rest of its files, and the error."""
