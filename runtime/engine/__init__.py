"""Continuous batching on any runner: requests, scheduler, engine. It knows no model.

Importing this package is quick: torch is imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runner.batch import DeviceLost, Runner, SequenceSampling, StepBatch, StepResult
    from ..runner.constraint import Constraint, TokenFilter
    from ..runner.routing import RoutedExperts, RoutedLayer
    from ..runner.sampling_params import SamplingParams
    from .engine import Engine, EngineBusy
    from .requests.drafters import Drafter, PromptLookup
    from .requests.handle import AsyncRequestHandle, RequestHandle
    from .requests.outputs import (
        Chunk,
        Completion,
        EngineStats,
        FinishReason,
        RequestStats,
        Result,
        TokenLogprob,
    )
    from .requests.text import Detokenizer
    from .scheduling.config import EngineConfig

_PLACES = {
    "..runner.batch": ("DeviceLost", "Runner", "SequenceSampling", "StepBatch", "StepResult"),
    "..runner.constraint": ("Constraint", "TokenFilter"),
    "..runner.routing": ("RoutedExperts", "RoutedLayer"),
    "..runner.sampling_params": ("SamplingParams",),
    ".engine": ("Engine", "EngineBusy"),
    ".requests.drafters": ("Drafter", "PromptLookup"),
    ".requests.handle": ("AsyncRequestHandle", "RequestHandle"),
    ".requests.outputs": (
        *("Chunk", "Completion", "EngineStats", "FinishReason", "RequestStats", "Result"),
        "TokenLogprob",
    ),
    ".requests.text": ("Detokenizer",),
    ".scheduling.config": ("EngineConfig",),
}
"""Names that this package exports, by the module that has them."""
_MODULE = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "AsyncRequestHandle",
    "Chunk",
    "Completion",
    "Constraint",
    "Detokenizer",
    "DeviceLost",
    "Drafter",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "PromptLookup",
    "RequestHandle",
    "RequestStats",
    "Result",
    "RoutedExperts",
    "RoutedLayer",
    "Runner",
    "SamplingParams",
    "SequenceSampling",
    "StepBatch",
    "StepResult",
    "TokenFilter",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE[name], __name__), name)
