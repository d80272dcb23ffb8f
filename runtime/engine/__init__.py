"""Continuous batching on any runner: requests, scheduler, engine. It knows no model."""

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
