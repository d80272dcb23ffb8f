"""The families that are lowered, a row each: what their modules do not say of their forward.

All of them share ``model.embed_tokens``, ``layers[i].{input_layernorm, self_attn,
post_attention_layernorm, mlp}`` (or ``linear_attn``, see ``delta_net``; Gemma's have more norms,
see ``sandwich``), ``norm`` and ``lm_head``.
The kind of attention, its norms, biases and sizes, shared experts, a router's groups and dense
layers are read off the modules, so a family that does nothing new is a row. A row says that
somebody has read the family's forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from pykernels.errors import PykernelsError
from pykernels.shapes import GEGLU, SWIGLU, ExpertSpec

STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")
"""Rotary embeddings whose frequencies do not change with the length of a sequence."""


ONE_ROPE = ("",)
ACTIVATIONS = {"silu": SWIGLU, "swish": SWIGLU, "gelu_pytorch_tanh": GEGLU}
"""What gated MLPs may do, by ``hidden_act``."""


@dataclass(frozen=True)
class Family:
    """What a family does.

    Attributes:
        interleaved: the rotary embedding turns pairs (2i, 2i + 1), not (i, i + R / 2); a config's
            ``rope_interleave`` overrides it.
        windowed: attention keeps to ``sliding_window`` tokens, in those layers that ``layer_types``
            names, if it does.
        scoring: of the router, see ``RouterSpec``; a sigmoid counts a group by its two best.
        renormalize: whether a token's weights are divided by their sum, where the router does not
            say so itself (``norm_topk_prob``).
        zero_centred: norms are stored less 1, but for those with a gate.
        gated: the queries of a head have its gate beside them, whose sigmoid its result is
            multiplied by.
        eagerly: settings with which it cannot be lowered, and what they are.
    """

    interleaved: bool = False
    windowed: bool = False
    scoring: str = "softmax"
    renormalize: bool = True
    zero_centred: bool = False
    gated: bool = False
    eagerly: Mapping[str, str] = field(default_factory=dict)

    @property
    def norm_change(self) -> str:
        """What becomes of norms while they are loaded, see ``Part.change``."""
        return "plus one" if self.zero_centred else ""

    def window(self, config: Any, layer: int) -> int:
        """Tokens that a layer's queries see, their own included; 0: all before them."""
        types = getattr(config, "layer_types", None)
        if not self.windowed or (types is not None and types[layer] != "sliding_attention"):
            return 0
        return getattr(config, "sliding_window", None) or 0


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(interleaved=True, renormalize=False),
    "deepseek_v3": Family(interleaved=True, scoring="sigmoid"),
    "dots1": Family(windowed=True, scoring="sigmoid"),
    "ernie4_5_moe": Family(interleaved=True),
    "gemma4_text": Family(
        windowed=True,
        eagerly={
            "hidden_size_per_layer_input": "per-layer inputs, which E2B and E4B have",
            "num_kv_shared_layers": "layers that share keys and values",
        },
    ),
    "glm4_moe": Family(scoring="sigmoid"),
    "glm4_moe_lite": Family(interleaved=True, scoring="sigmoid"),
    "gpt_oss": Family(windowed=True),
    "llama": Family(),
    "minimax_m2": Family(scoring="sigmoid"),
    "mixtral": Family(windowed=True),
    "olmoe": Family(eagerly={"clip_qkv": "clipped queries, keys and values"}),
    "qwen2_moe": Family(windowed=True),
    "qwen3_moe": Family(windowed=True),
    "qwen3_5_moe_text": Family(zero_centred=True, gated=True),
    "qwen3_next": Family(zero_centred=True, gated=True),
}
"""By ``model_type``."""


def why_not(config: PretrainedConfig) -> str | None:
    """Why a model cannot be lowered; None if it can."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"there is no lowering of {config.model_type}, only of {', '.join(FAMILIES)}"
    for name, what in family.eagerly.items():
        if getattr(config, name, None):
            return f"there is no lowering of {what} ({name})"
    if getattr(config, "use_bidirectional_attention", None) == "all":
        return "there is no lowering of attention to later tokens (use_bidirectional_attention)"
    rope = getattr(config, "rope_parameters", None) or {}
    for each in rope.values() if rope_kinds(config) != ONE_ROPE else (rope,):
        kind = each.get("rope_type", "default")
        same = kind == "longrope" and each.get("short_factor") == each.get("long_factor")
        if kind not in STATIC_ROPE and not same:
            return f"there is no lowering of the rope_type {kind}"
    act = _activation(config)
    return None if act in ACTIVATIONS else f"there is no kernel for the hidden_act {act}"


def rope_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """The kinds of layers that have a rotary embedding of their own; ``ONE_ROPE``: all the same."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope and all(isinstance(each, Mapping) for each in rope.values())
    return tuple(sorted(rope)) if nested else ONE_ROPE


def mlp_spec(config: PretrainedConfig) -> ExpertSpec:
    """What the config's gated MLPs do beside their products."""
    return ACTIVATIONS[_activation(config)]


def _activation(config: PretrainedConfig) -> str:
    """Gemma's word is ``hidden_activation``."""
    default = getattr(config, "hidden_activation", "silu")
    return getattr(config, "hidden_act", default) or default


def check_lowered(config: PretrainedConfig) -> None:
    """Raises PykernelsError for a model that cannot be lowered."""
    if reason := why_not(config):
        raise PykernelsError(f"the engine cannot run this model: {reason}", "Use --eager")
