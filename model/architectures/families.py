"""The families that are lowered, a row each: what their modules do not say of their forward.

All of them share ``model.embed_tokens``, ``layers[i]``, in which a mixer and an MLP are, and
``lm_head``; what else they are made of is called as ``Names`` says. The kind of attention, or of
what is in its place (``mixer``), norms, biases and sizes, shared experts, a router's groups and
dense layers are read off the modules, so a family that does nothing new is a row; layers with more
norms are in ``sandwich``. A row says that
somebody has read the family's forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig

from pykernels.errors import PykernelsError
from pykernels.shapes import GEGLU, SWIGLU, ExpertSpec

STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional")
"""Rotary embeddings whose frequencies do not change with the length of a sequence."""


ONE_ROPE = ("",)
"""``rope_kinds`` of a model whose layers all have the same rotary embedding."""
ACTIVATIONS = {"silu": SWIGLU, "swish": SWIGLU, "gelu_pytorch_tanh": GEGLU}
"""What gated MLPs may do, by ``hidden_act``."""


@dataclass(frozen=True)
class Names:
    """What a family calls the modules of its decoder, and their parameters.

    Attributes:
        norm, rotary: of the decoder; ``input_norm``, ``post_norm``, ``mlp``: of a layer.
        o, q_norm, k_norm: of attention; ``gate``, ``up``, ``down``: of a dense MLP.
        choice_bias: what the name of an MoE block's bias of scores ends with.
    """

    norm: str = "norm"
    rotary: str = "rotary_emb"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    choice_bias: str = "e_score_correction_bias"

    def of_mlp(self, mlp: str) -> tuple[str, str, str]:
        """The matrices of a gated MLP of that name."""
        gate, up, down = (f"{mlp}.{leaf}.weight" for leaf in (self.gate, self.up, self.down))
        return gate, up, down


_USUAL = Names()
_LFM2 = Names(
    norm="embedding_norm",
    input_norm="operator_norm",
    post_norm="ffn_norm",
    mlp="feed_forward",
    o="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    gate="w1",
    up="w3",
    down="w2",
    choice_bias="expert_bias",
)


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
        tiled: the value heads of a gated delta net go over the key heads in turns; a config's
            ``tiled_value_heads``, which GGUF files of Qwen3.5 have, sets it.
        eagerly: settings with which it cannot be lowered, and what they are.
        names: of its modules.
    """

    interleaved: bool = False
    windowed: bool = False
    scoring: str = "softmax"
    renormalize: bool = True
    zero_centred: bool = False
    gated: bool = False
    tiled: bool = False
    eagerly: Mapping[str, str] = field(default_factory=dict)
    names: Names = _USUAL

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
    "lfm2": Family(names=_LFM2),
    "lfm2_moe": Family(scoring="sigmoid", names=replace(_LFM2, rotary="pos_emb")),
    "llama": Family(),
    "minimax_m2": Family(scoring="sigmoid"),
    "mixtral": Family(windowed=True),
    "olmoe": Family(eagerly={"clip_qkv": "clipped queries, keys and values"}),
    "qwen2_moe": Family(windowed=True),
    "qwen3_moe": Family(windowed=True),
    "qwen3_5_moe_text": Family(zero_centred=True, gated=True),
    "qwen3_next": Family(zero_centred=True, gated=True),
}
"""Families by ``model_type``."""


def family_of(config: Any) -> Family:
    """What the family of a configuration does, as this one asks for it."""
    row = FAMILIES[config.model_type]
    return replace(row, tiled=bool(getattr(config, "tiled_value_heads", row.tiled)))


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
    """What the config's gated MLPs do in parallel with their products."""
    return ACTIVATIONS[_activation(config)]


def _activation(config: PretrainedConfig) -> str:
    """Gemma's word is ``hidden_activation``."""
    default = getattr(config, "hidden_activation", "silu")
    return getattr(config, "hidden_act", default) or default


def check_lowered(config: PretrainedConfig) -> None:
    """Raises PykernelsError for a model that cannot be lowered."""
    if reason := why_not(config):
        raise PykernelsError(f"the engine cannot run this model: {reason}", "Use --eager")
