"""What a user of the engine chooses: sizes of a step, the KV cache, and how requests share both."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pykernels.errors import PykernelsError

PREFILL_CAP_FLOOR = 8
"""Fewest prompt tokens of a step: one tile of the kernels. Below it a prompt would never end."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; each is checked when the object is made.

    Attributes:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most sequences that run at once.
        max_num_logits: rows of logits that a step may compute; None: one per sequence. Logprobs
            of prompt tokens take one row each.
        max_model_len: longest sequence in tokens; None: the model's, at most 8,192.
        kv_tokens: size of the KV cache in tokens, rounded up to pages; None: see ``kv_bytes``.
        kv_bytes: size of the KV cache in bytes; None with ``kv_tokens`` None: as many sequences
            of ``max_model_len`` as fit into an eighth of the free memory, two at least.
        kv_dtype: "bf16", or "fp8" (E4M3 with a scale per token and head): half the memory.
        target_itl_ms: inter-token time to keep while a prompt is read beside running decodes; the
            prompt tokens of such a step are capped by measured step times. None: no cap.
        max_partial_prefills: prompts that may be under way in one step.
        max_waiting: requests that may wait to be admitted; more are refused with ``EngineBusy``.
            None: no limit.
        ageing_seconds: a request that has waited so much longer than another is served as if its
            priority were better by one.

    Raises:
        PykernelsError: a value out of its range, by name.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    max_num_logits: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    kv_dtype: str = "bf16"
    target_itl_ms: float | None = None
    max_partial_prefills: int = 4
    max_waiting: int | None = None
    ageing_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "kv_dtype" or (value is None and field.default is None):
                continue
            whole = field.name not in ("target_itl_ms", "ageing_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "a whole number" if whole else "a number"
                raise PykernelsError(f"{field.name} is {value!r}", f"Give {kind}")
            least = 0 if field.name == "max_waiting" else 1 if whole else math.ulp(0.0)
            if not least <= value < math.inf:
                want = f"{least} or more" if whole else "a positive number"
                raise PykernelsError(f"{field.name} is {value}", f"Give {want}")
        if self.kv_tokens is not None and self.kv_bytes is not None:
            raise PykernelsError(
                "kv_tokens and kv_bytes both give the size of the KV cache", "Give one of them"
            )
