"""The float32 torch truth for every op, same name and signature as the fast one."""

from .moe import moe_ffn

__all__ = ["moe_ffn"]
