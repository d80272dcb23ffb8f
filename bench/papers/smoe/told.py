"""What the text of SMOE says of its figures. What is only drawn is not here."""

from __future__ import annotations

from statistics import mean

from ..on import System
from ..sosp.told import LAUNCHES, LAYERS

NODE = "smoe-4090"
EAGER = System(LAUNCHES["Fiddler"][0] / LAYERS, LAUNCHES["Fiddler"][1])
"""Section VI-A: no CUDA graph; PyTorch's modules, of which SOSP 2025 counts the launches."""

COLUMNS = ("KTransformers", "HybriMoE", "SMOE", "SMOE-Flex")
TABLE_I = {
    "DeepSeek-V3": {
        "AC_Prompts": (3.084, 3.118, 3.600, 3.727),
        "Flores-101": (3.132, 2.952, 3.399, 3.316),
        "GSM8K": (3.224, 3.013, 3.462, 3.470),
        "HumanEval": (3.248, 2.949, 3.468, 3.530),
        "TriviaQA": (3.100, 2.778, 3.364, 3.338),
        "XSum": (3.188, 2.862, 3.472, 3.238),
    },
    "Qwen3-235B": {
        "AC_Prompts": (2.919, 2.998, 3.279, 3.067),
        "Flores-101": (2.933, 2.936, 3.052, 3.156),
        "GSM8K": (2.960, 2.963, 3.187, 3.110),
        "HumanEval": (3.019, 2.988, 3.197, 3.059),
        "TriviaQA": (2.869, 2.953, 2.994, 3.219),
        "XSum": (2.798, 2.908, 3.252, 3.067),
    },
}
"""Tokens a second by model, data set and program."""
SLOTS = 8
"""Section VI-D: experts of a layer that the GPU holds."""
PREFETCHED = {"DeepSeek-V3": 2, "Qwen3-235B": 3}
"""Section VI-D: experts of a layer that come in a step, at the best."""
MODELS = {"DeepSeek-V3": "deepseek-v3", "Qwen3-235B": "qwen3-235b"}
"""Their shapes."""
FMT = "q4_k"

PROMPT_GAIN = {("DeepSeek-V3", 400): 2.64, ("DeepSeek-V3", 4096): 8.68, ("Qwen3-235B", 4096): 7.0}
"""Figure 10: over KTransformers, at so many tokens; the last two are the most."""
LINK_GBPS, GPU_BUSY = 14.0, 60.0
"""Figure 12: "up to", 1e9 bytes a second; about, %."""
LAYER_WISE_WAIT_MS = 1.0
"""Figure 13: HybriMoE waits about so long in each layer for two experts, SMOE next to nothing."""


def means(model: str) -> dict[str, float]:
    """Returns the mean over all data sets, by program."""
    return {name: mean(row[i] for row in TABLE_I[model].values()) for i, name in enumerate(COLUMNS)}
