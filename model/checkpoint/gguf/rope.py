"""Rotary embedding: llama.cpp's keys as what transformers' configurations have.

Source: llama.cpp, ``llama_model_base::load_hparams`` and the constructor of ``llama_context``.
"""

from __future__ import annotations

from typing import Any

from pykernels.errors import PykernelsError

from ..tensors.floats import floats
from ..tensors.safetensors import TensorSlice
from .files import GGUF
from .metadata import Metadata

_LOG_MULTIPLIER = 0.1
"""``yarn_log_multiplier`` is DeepSeek's ``mscale_all_dim`` times this."""
_KINDS = ("none", "linear", "yarn")


def rope(meta: Metadata, factors: list[float] | None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`.

    Args:
        factors: by which frequencies are divided, one for each pair of numbers (llama 3).
    """
    theta = meta.number("rope.freq_base", 10000.0)
    if theta <= 0:
        raise meta.wrong("rope.freq_base", theta)
    return {"rope_theta": theta, "rope_scaling": _scaling(meta, factors)}


def turned_share(checkpoint: GGUF, D: int) -> float:
    """The share of a head's D numbers that a proportional embedding turns: the first pairs, whose
    frequency ``rope_freqs.weight`` divides by 1. A pair whose divisor is 1e30 does not turn.

    Raises:
        PykernelsError: other factors.
    """
    if "rope_freqs.weight" not in checkpoint.tensors:
        return 1.0
    factors = floats(checkpoint, TensorSlice("rope_freqs.weight")).flatten()
    turned = int((factors == 1).sum())
    still = factors[turned:]
    if len(factors) != D // 2 or (factors[:turned] != 1).any() or (still < 1e29).any():
        raise PykernelsError(
            f"{checkpoint.path} has a rope_freqs.weight {list(factors.shape)} of other factors"
            f" than 1 and 1e30, or not of {D // 2}",
            checkpoint.mismatch,
        )
    return turned / len(factors)


def _scaling(meta: Metadata, factors: list[float] | None) -> dict[str, Any]:
    kind = meta.word("rope.scaling.type", "linear")
    if kind not in _KINDS:
        raise meta.unsupported("rope.scaling.type", kind, " or ".join(_KINDS))
    factor = 1.0 if kind == "none" else _factor(meta)
    context = meta.count("context_length")
    if factors is not None:
        if kind == "yarn" and factor != 1:
            raise meta.unsupported("rope.scaling.type", kind, "linear, beside rope_freqs.weight,")
        divisors = [one * factor for one in factors]
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if factor == 1:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        "original_max_position_embeddings": (
            meta.count("rope.scaling.original_context_length", 0) or context
        ),
    }
    if multiplier := meta.number("rope.scaling.yarn_log_multiplier", 0.0):
        scaling["mscale"] = scaling["mscale_all_dim"] = multiplier / _LOG_MULTIPLIER
    return scaling


def _factor(meta: Metadata) -> float:
    """The factor by which positions are stretched. ``rope.scale_linear`` is the key's old name; 0
    stands for 1, not stretched."""
    key = "rope.scaling.factor" if meta.has("rope.scaling.factor") else "rope.scale_linear"
    factor: float = meta.number(key, 0.0) or 1.0
    if factor < 0:
        raise meta.wrong(key, factor)
    return factor
