"""The types of matrices that files have, by our names of the formats."""

from __future__ import annotations

from model.random_model import fitting

TYPES = {
    "bf16": ("BF16", "MOSTLY_BF16"),
    "f16": ("F16", "MOSTLY_F16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q5_1": ("Q5_1", "MOSTLY_Q5_1"),
    "iq4_nl": ("IQ4_NL", "MOSTLY_IQ4_NL"),
    "iq4_xs": ("IQ4_XS", "MOSTLY_IQ4_XS"),
    "iq2_xxs": ("IQ2_XXS", "MOSTLY_IQ2_XXS"),
    "iq2_xs": ("IQ2_XS", "MOSTLY_IQ2_XS"),
    "iq2_s": ("IQ2_S", "MOSTLY_IQ2_S"),
    "iq3_xxs": ("IQ3_XXS", "MOSTLY_IQ3_XXS"),
    "iq3_s": ("IQ3_S", "MOSTLY_IQ3_S"),
    "iq1_s": ("IQ1_S", "MOSTLY_IQ1_S"),
    "iq1_m": ("IQ1_M", "MOSTLY_IQ1_M"),
    "tq1_0": ("TQ1_0", "MOSTLY_TQ1_0"),
    "tq2_0": ("TQ2_0", "MOSTLY_TQ2_0"),
    "q2_k": ("Q2_K", "MOSTLY_Q2_K"),
    "q3_k": ("Q3_K", "MOSTLY_Q3_K_S"),
    "q4_k": ("Q4_K", "MOSTLY_Q4_K_S"),
    "q5_k": ("Q5_K", "MOSTLY_Q5_K_S"),
    "q6_k": ("Q6_K", "MOSTLY_Q6_K"),
}
"""Our formats that GGUF stores alike: its names of the type and of a file of it."""
EXACT = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
"""Matrices that llama.cpp keeps in float32."""


def type_of(name: str, shape: tuple[int, ...], fmt: str) -> str:
    """The format of a tensor in a file of ``fmt``: "f32", or one of ``TYPES``. As in files of
    `llama-quantize`, a matrix whose rows are no multiple of the format's blocks has another one."""
    exact = len(shape) == 1 or any(part in name for part in EXACT)
    return "f32" if exact else fitting(fmt, shape[-1])
