"""What a user of the engine chooses: sizes of a step, the KV cache, and how requests share both.

On which devices a model runs, and how, is ``planning.config.ExecutionConfig``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykernels.errors import PykernelsError

from ...planning.option import SettingError, check_whole, option

PREFILL_CAP_FLOOR = 8
"""Fewest prompt tokens of a step: one tile of the kernels. Below it a prompt would never end."""

STEP_TOKENS = 512
"""Token budget of a step where weights lie in main memory."""

MOST = {
    "max_num_batched_tokens": 1 << 16,  # each buffer of a step has room for all
    "max_num_seqs": 1 << 12,
    "max_num_logits": 1 << 16,
    "max_model_len": 1 << 31,
    "kv_tokens": 1 << 40,
    "kv_bytes": 1 << 50,
    "max_partial_prefills": 1 << 12,
    "max_waiting": 1 << 31,
}
"""Largest values of whole numbers."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; each is checked when the object is made.

    Attributes:
        max_num_batched_tokens: token budget of a step; None: ``STEP_TOKENS``, and on a GPU that
            holds all experts, or to which they are streamed, as many as its memory allows, up to
            4,096, and 32,768 where the link takes so long.
        max_num_seqs: most sequences that run at once.
        max_num_logits: rows of logits that a step may compute; None: one per sequence. Logprobs
            of prompt tokens take one row each.
        max_model_len: longest sequence in tokens; None: the model's, at most 8,192.
        kv_tokens: size of the KV cache in tokens, rounded up to pages; None: see ``kv_bytes``.
        kv_bytes: size of the KV cache in bytes; None with ``kv_tokens`` None: as many sequences
            of ``max_model_len`` as fit into an eighth of the free memory, two at least.
        target_itl_ms: inter-token time to keep while a prompt is read beside running decodes; the
            prompt tokens of such a step are capped by measured step times. None: no cap.
        max_partial_prefills: prompts that may be under way in one step.
        max_waiting: requests that may wait to be admitted; more are refused with ``EngineBusy``.
            None: no limit.
        ageing_seconds: a request that has waited so much longer than another is served as if its
            priority were better by one.
        overlap: schedule a step, and deliver the tokens of the one before, while a step runs. What
            is drawn is the same.

    Raises:
        SettingError: a value out of its range, by name.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int = option(16, "Outputs run at once.", "N", kind=int, least=1)
    max_num_logits: int | None = None
    max_model_len: int | None = option(
        None,
        "Longest prompt with its answer.",
        "N",
        kind=int,
        shown="the model's, at most 8192",
        least=1,
    )
    kv_tokens: int | None = option(
        None,
        "Tokens in the KV cache.",
        "N",
        kind=int,
        shown="what an eighth of the memory holds",
        least=1,
    )
    kv_bytes: int | None = None
    target_itl_ms: float | None = option(
        None, "Between two tokens, kept while prompts are read.", "MS", kind=float
    )
    max_partial_prefills: int = 4
    max_waiting: int | None = None
    ageing_seconds: float = 30.0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None or name == "max_num_seqs":
                check_whole(name, value, 0 if name == "max_waiting" else 1, most)
        for name in ("target_itl_ms", "ageing_seconds"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise SettingError(name, value, "Give a positive number")
        if not isinstance(self.overlap, bool):
            raise SettingError("overlap", self.overlap, "Give True or False")
        if self.kv_tokens is not None and self.kv_bytes is not None:
            raise PykernelsError(
                "kv_tokens and kv_bytes both give the size of the KV cache", "Give one of them"
            )
