"""Continuous batching on any runner: requests, scheduler, engine. It knows no model."""

from .batch import Runner, SequenceSampling, StepBatch, StepResult
from .engine import Engine
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
from .sampling_params import SamplingParams
from .text import Detokenizer

__all__ = [
    "AsyncRequestHandle",
    "Chunk",
    "Completion",
    "Detokenizer",
    "Engine",
    "EngineStats",
    "FinishReason",
    "RequestHandle",
    "RequestStats",
    "Result",
    "Runner",
    "SamplingParams",
    "SequenceSampling",
    "StepBatch",
    "StepResult",
    "TokenLogprob",
]
