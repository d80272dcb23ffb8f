"""The float32 torch truth for every op, by the name of the fast one and with all of its inputs.

Where both take a parameter it has the same place and default (``test_twins.py``). What only
the fast one takes is how it is launched and where its result goes; what only the truth takes is
what it computes in (``dtype``) and what a packed weight knows by itself (``fmt``).
"""

from .attention import gqa_decode, gqa_prefill, mla_decode, mla_prefill
from .delta_net.causal_conv1d import causal_conv1d
from .delta_net.delta_rule import delta_gates, gated_delta_rule
from .delta_net.gate import gated_rms_norm, sigmoid_mul
from .embedding import embed
from .kv_write import cache_write, kv_write, mla_read, mla_write
from .linear import linear, per_head_linear, quantize_fp8
from .moe import combine, copy_rows, moe_ffn
from .norm import post_norm, rms_norm, softcap
from .pairs import place_pairs, sum_pairs, take_pairs
from .permute import permute, sort_pairs, unpermute
from .rope import rope, rope_frequencies, yarn_frequencies, yarn_scale
from .rope_cache_write import gqa_rope_cache_write, mla_rope_cache_write, rope_table
from .router import place_routing, rank_experts, router, router_logits
from .sampling import greedy
from .sampling.inputs import count_tokens, sample

__all__ = [
    "cache_write",
    "causal_conv1d",
    "combine",
    "copy_rows",
    "count_tokens",
    "delta_gates",
    "embed",
    "gated_delta_rule",
    "gated_rms_norm",
    "gqa_decode",
    "gqa_prefill",
    "gqa_rope_cache_write",
    "greedy",
    "kv_write",
    "linear",
    "mla_decode",
    "mla_prefill",
    "mla_read",
    "mla_rope_cache_write",
    "mla_write",
    "moe_ffn",
    "per_head_linear",
    "permute",
    "place_pairs",
    "place_routing",
    "post_norm",
    "quantize_fp8",
    "rank_experts",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_table",
    "router",
    "router_logits",
    "sample",
    "sigmoid_mul",
    "softcap",
    "sort_pairs",
    "sum_pairs",
    "take_pairs",
    "unpermute",
    "yarn_frequencies",
    "yarn_scale",
]
