"""CPU kernels: serial, allocation-free tiles that ``runtime`` spreads over threads.

The ops that are exported here run them on the calling thread alone, each the twin of the op of its
name in ``pykernels.ref``.
"""

from __future__ import annotations

from .moe.call import MoECall, MoEWorkspace
from .moe.kernel import make_kernel, make_routines
from .moe.plan import MoEPlan, plan
from .ops.attention import gqa_decode, gqa_prefill, mla_decode
from .ops.delta_net import causal_conv1d, gated_delta_rule
from .ops.embedding import embed
from .ops.gate import delta_gates, gated_rms_norm, sigmoid_mul
from .ops.linear import linear
from .ops.moe import moe_ffn, run_serially
from .ops.norm import post_norm, rms_norm, softcap
from .ops.rope import gqa_rope_cache_write, mla_rope_cache_write, rope_table
from .ops.router import router
from .sampling import sample, sample_requests
from .weights.pack import make_pack, pack_job, packs_scales

__all__ = [
    "MoECall",
    "MoEPlan",
    "MoEWorkspace",
    "causal_conv1d",
    "delta_gates",
    "embed",
    "gated_delta_rule",
    "gated_rms_norm",
    "gqa_decode",
    "gqa_prefill",
    "gqa_rope_cache_write",
    "linear",
    "make_kernel",
    "make_pack",
    "make_routines",
    "mla_decode",
    "mla_rope_cache_write",
    "moe_ffn",
    "pack_job",
    "packs_scales",
    "plan",
    "post_norm",
    "rms_norm",
    "rope_table",
    "router",
    "run_serially",
    "sample",
    "sample_requests",
    "sigmoid_mul",
    "softcap",
]
