"""Which part of a layer mixes its tokens, and what of ours it is."""

from __future__ import annotations

from typing import Any

from .attention import MLA
from .delta_net import GatedDeltaNet
from .gqa import GQA
from .short_conv import ShortConv

Kind = type[MLA] | type[GQA] | type[GatedDeltaNet] | type[ShortConv]


def mixer(layer: Any) -> tuple[str, Any, Kind]:
    """A layer's attention, or what is in its place: its name there, the module, and its kind."""
    if hasattr(layer, "linear_attn"):
        return "linear_attn", layer.linear_attn, GatedDeltaNet
    if hasattr(layer, "conv"):
        return "conv", layer.conv, ShortConv
    module = layer.self_attn
    return "self_attn", module, MLA if hasattr(module, "kv_a_proj_with_mqa") else GQA
