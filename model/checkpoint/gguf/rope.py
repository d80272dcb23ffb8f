"""Rotary embedding: what llama.cpp's keys say of it, as transformers' configurations do."""

from __future__ import annotations

from typing import Any

from .metadata import Metadata

_LOG_MULTIPLIER = 0.1
"""What ``yarn_log_multiplier`` is of DeepSeek's ``mscale_all_dim``."""


def rope(meta: Metadata, factors: list[float] | None) -> dict[str, Any]:
    """`rope_theta`, and `rope_scaling` if there is some.

    Args:
        factors: by which frequencies are divided, one for each pair of numbers (llama 3).
    """
    config: dict[str, Any] = {"rope_theta": meta.number("rope.freq_base", 10000.0)}
    kind, factor = meta.word("rope.scaling.type", "none"), meta.number("rope.scaling.factor", 1.0)
    original = meta.count("rope.scaling.original_context_length", 0)
    if factors is not None:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": meta.count("context_length"),
        }
    elif kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
            "original_max_position_embeddings": original or meta.count("context_length"),
        }
        if multiplier := meta.number("rope.scaling.yarn_log_multiplier", 0.0):
            scaling["mscale"] = scaling["mscale_all_dim"] = multiplier / _LOG_MULTIPLIER
        config["rope_scaling"] = scaling
    elif kind != "none":
        raise meta.wrong("rope.scaling.type", kind)
    return config
