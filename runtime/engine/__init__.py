"""Continuous batching on any runner: requests, scheduler, engine. It knows no model."""

from ..runner.batch import DeviceLost, Runner, SequenceSampling, StepBatch, StepResult
from ..runner.constraint import Constraint, TokenFilter
from ..runner.routing import RoutedExperts, RoutedLayer
from ..runner.sampling_params import SamplingParams
from .config import EngineConfig
from .engine import Engine, EngineBusy
from .handle import AsyncRequestHandle, RequestHandle
from .outputs import (
    Chunk,
    Completion,
    EngineStats,
    FinishReason,
    RequestStats,
    Result,
    TokenLogprob,
)
from .text import Detokenizer

__all__ = [
    "AsyncRequestHandle",
    "Chunk",
    "Completion",
    "Constraint",
    "Detokenizer",
    "DeviceLost",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
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
