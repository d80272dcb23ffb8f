"""Continuous batching on any runner: requests, scheduler, engine. It knows no model."""

from .batch import DeviceLost, Runner, SequenceSampling, StepBatch, StepResult
from .config import EngineConfig
from .constraint import Constraint, TokenFilter
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
from .routing import RoutedExperts, RoutedLayer
from .sampling_params import SamplingParams
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
