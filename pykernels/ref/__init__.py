"""The float32 torch truth for every op, same name and signature as the fast one."""

from .attention import gqa_decode, gqa_prefill, mla_decode, mla_prefill
from .moe import moe_ffn

__all__ = ["gqa_decode", "gqa_prefill", "mla_decode", "mla_prefill", "moe_ffn"]
