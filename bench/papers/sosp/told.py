"""What the text of KTransformers (SOSP 2025) says of its figures, and the machines and models that
they are of. What is only drawn is not here."""

from __future__ import annotations

from ..on import System

A100, RTX = "sosp25-a100", "sosp25-4080"
MODELS = (
    ("DS-3", "deepseek-v3", "bf16", A100, 3),
    ("DS-2", "deepseek-v2.5", "bf16", A100, 4),
    ("QW-2", "qwen2-57b", "bf16", A100, 2),
    ("DS-3", "deepseek-v3", "int4", RTX, 6),
    ("DS-2", "deepseek-v2.5", "int8", RTX, 4),
    ("QW-2", "qwen2-57b", "int8", RTX, 4),
)
"""Name, shape, format, machine, and experts that section 6.3 defers."""

SOCKET_TFLOPS = {"KTransformers, AMX": 21.3, "PyTorch, AMX": 5.4, "PyTorch, AVX-512": 1.8}
"""Figure 3: the most of a socket."""
LAUNCHES = {"Fiddler": (7000, 16.0, 73.0), "llama.cpp": (3000, 5.0, 21.0)}
"""Figure 4: launches of a token, us of each on average, and their share of the GPU's time, %."""
LAYERS = 61
FIDDLER_MOE_MS, FIDDLER_MOE_ONE_SOCKET_MS = 5.8, 6.9
"""Section 2.3: a layer's experts of DeepSeek-V3 for one token, on two sockets and on one."""
AVX_MOST_TOKENS, AVX_OVER_AMX, AMX_OVER_AVX = 4, 1.20, 10.81
"""Figure 7: tokens an expert up to which AVX-512 is the faster kernel; the most that it gains in
decoding, and that AMX gains in prompts."""
BUSY = {"cpu": 74.0, "cuda:0": 28.0}
"""Figure 10, no experts deferred, %."""
LESS_A_LAYER = {2: 19.0, 3: 26.0, 4: 26.0}
"""Figure 10: % of a layer's time that deferring so many experts saves; four save no more than
three."""
DEFERRED_GAIN, MOST_DEFERRED_GAIN = 1.33, 1.45
"""Section 4.2, of three experts of DeepSeek-V3; figure 12, of any model."""
BF16_TOK_S, INT4_TOK_S, INT4_PROMPT_TOK_S = 5.87, 16.0, 500.0
"""DeepSeek-V3: section 1, no experts deferred; the last two as OSDI 2026 quotes figures 12, with
deferral, and 11, at 2,048 tokens."""
OVER_FIDDLER = (2.42, 4.09)
"""Section 6.2: decoding without deferral, the least and the most of the three models."""
STAGES = {
    ("decode", "v"): 2.22,
    ("prompt", "m"): 3.14,
    ("prompt", "d"): 1.83,
    ("decode", "n"): 1.63,
    ("prompt", "n"): 1.22,
    ("decode", "c"): 1.23,
}
"""Figure 14: the most that a stage gains of the three models."""
TABLE_2 = {
    "DS-3 (8+0)": (83.0, 71.2, 94.8, 83.0),
    "DS-3 (2+6)": (83.0, 70.2, 95.2, 82.9),
    "DS-2 (6+0)": (80.5, 67.6, 93.3, 79.7),
    "DS-2 (2+4)": (82.5, 66.8, 92.8, 80.4),
    "QW-2 (8+0)": (65.7, 52.4, 84.7, 83.6),
    "QW-2 (4+4)": (67.4, 53.4, 83.4, 82.5),
}
BENCHMARKS = ("HumanEval", "MBPP", "GSM8K", "StrategyQA")
"""Table 2's columns."""

KT = System(LAUNCHES["Fiddler"][0] / LAYERS)
"""Its GPU part is PyTorch's modules, as Fiddler's: it has as many kernels, in a CUDA graph."""
EAGER = System(LAUNCHES["Fiddler"][0] / LAYERS, LAUNCHES["Fiddler"][1])
"""The same without a graph."""
