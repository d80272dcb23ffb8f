"""The float32 torch truth for every op, same name and signature as the fast one."""

from .moe import moe_ffn
from .permute import permute, sort_slots, unpermute
from .router import router, router_logits

__all__ = ["moe_ffn", "permute", "router", "router_logits", "sort_slots", "unpermute"]
