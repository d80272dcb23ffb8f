"""What a user of the engine chooses: sizes of a step, the KV cache, and how requests share both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykernels.errors import PykernelsError

from ...experts.cache import CachePolicy
from ...workers.numa import AUTO, check_numa
from ..requests.drafters import MakeDrafter, PromptLookup

PREFILL_CAP_FLOOR = 8
"""Fewest prompt tokens of a step: one tile of the kernels. Below it a prompt would never end."""

STEP_TOKENS = 512
"""Token budget of a step where weights lie in main memory."""

SNAPSHOT_TOKENS = 1024
"""From one snapshot of a prompt's state to the next. Each takes as much memory as the keys and
values of some thousand tokens, and makes one step more of the prompt."""

PREFILL = ("auto", "cpu", "split", "stream")
"""Where experts of prompts are computed, if they lie in main memory beside a GPU."""

DRAFTERS: dict[str, MakeDrafter] = {"ngram": PromptLookup}
"""Where drafts come from, by name."""

MOST_DRAFTS = 256
"""Of an output in a step."""

MOST_EXPERTS = 1 << 16
"""Of a layer, and so of its slots."""

MOST = {
    "max_num_batched_tokens": 1 << 16,  # each buffer of a step has room for all
    "max_num_seqs": 1 << 12,
    "max_num_logits": 1 << 16,
    "max_model_len": 1 << 31,
    "kv_tokens": 1 << 40,
    "kv_bytes": 1 << 50,
    "max_partial_prefills": 1 << 12,
    "max_waiting": 1 << 31,
    "snapshot_tokens": 1 << 31,
    "snapshots": 1 << 16,
}
"""Largest values of whole numbers."""

_OR_NONE = ("max_waiting", "snapshot_tokens", "snapshots")
"""Of these, those that may be 0."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; each is checked when the object is made.

    Attributes:
        max_num_batched_tokens: token budget of a step; None: ``STEP_TOKENS``, and on a GPU that
            holds all experts, or to which they are streamed, as many as its memory allows, up to
            4,096, and 32,768 where the link takes so long.
        max_num_seqs: most sequences that run at once.
        max_num_logits: rows of logits that a step may compute; None: one per sequence, and one
            for each draft. Logprobs of prompt tokens take one row each.
        max_model_len: longest sequence in tokens; None: the model's, at most 8,192.
        kv_tokens: size of the KV cache in tokens, rounded up to pages; None: see ``kv_bytes``.
        kv_bytes: size of the KV cache in bytes; None with ``kv_tokens`` None: as many sequences
            of ``max_model_len`` as fit into an eighth of the free memory, two at least.
        kv_dtype: "bf16", or "fp8" (E4M3 with a scale per token and head): half the memory.
        snapshot_tokens: of a model whose layers have a state of each sequence: tokens of a prompt
            from one snapshot of its state to the next; with another at its end and at the end of
            the output. A prompt that begins like an earlier one is read from a snapshot on. None:
            1,024; 0: no snapshots.
        snapshots: that are kept besides the states of running sequences, the most recently used
            ones; None: as many as ``max_num_seqs``.
        dual_batch: whether decode steps of two sequences or more are two lanes, so that a GPU
            computes the attention of one while the CPU computes the experts of the other; "auto":
            beside experts on the CPU.
        prefill: where experts that lie in main memory beside a GPU are computed in steps with
            chunks of prompts: "cpu"; "stream": on the GPU, to which all of them cross in such a
            step; "split": some there, the others on the CPU; "auto": by the way that takes the
            least time for so many tokens, as measured.
        expert_cache: slots of each layer for experts that a GPU computes beside the others on the
            CPU, and that change from step to step by what the routers choose; "auto": as many as
            fit; "off".
        expert_cache_policy: which experts they hold, see ``experts.cache.CachePolicy``;
            ``expert_cache_swaps``: experts that are exchanged in each layer a step, at most.
        dense_gib: GiB of GPU memory for the dense weights of a model's layers. Those of as few
            layers as can be lie in main memory besides, and cross to the GPU in every step; "auto":
            of none, if all fit.
        target_itl_ms: inter-token time to keep while a prompt is read beside running decodes; the
            prompt tokens of such a step are capped by measured step times. None: no cap.
        max_partial_prefills: prompts that may be under way in one step.
        max_waiting: requests that may wait to be admitted; more are refused with ``EngineBusy``.
            None: no limit.
        numa: "auto": weights in one slice on each NUMA node, read by its own cores, where there are
            several; "off": no; or how many nodes there must be.
        ageing_seconds: a request that has waited so much longer than another is served as if its
            priority were better by one.
        draft: where drafts of an output's next tokens come from, all of which one step checks:
            "ngram": what came behind the same tokens before (prompt lookup); "off": there are
            none. What is drawn is the same.
        draft_tokens: drafts of an output in a step, at most.
        overlap: schedule a step, and deliver the tokens of the one before, while a step runs. What
            is drawn is the same.

    Raises:
        PykernelsError: a value out of its range, by name.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 16
    max_num_logits: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    kv_dtype: str = "bf16"
    snapshot_tokens: int | None = None
    snapshots: int | None = None
    dual_batch: bool | str = False
    prefill: str = "auto"
    expert_cache: int | str = "off"
    expert_cache_policy: str = CachePolicy.name
    expert_cache_swaps: int = CachePolicy.swaps
    dense_gib: float | str = "auto"
    target_itl_ms: float | None = None
    max_partial_prefills: int = 4
    max_waiting: int | None = None
    ageing_seconds: float = 30.0
    draft: str = "off"
    draft_tokens: int = 4
    overlap: bool = True
    numa: str | int = AUTO

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None or name == "max_num_seqs":
                check_whole(name, value, 0 if name in _OR_NONE else 1, most)
        check_whole("draft_tokens", self.draft_tokens, 1, MOST_DRAFTS)
        if self.draft not in ("off", *DRAFTERS):
            given = ", ".join(DRAFTERS)
            raise PykernelsError(f"draft={self.draft!r}", f"Give {given} or off")
        if self.draft != "off":
            check_drafts(self.draft_tokens, self)
        if self.draft != "off" and self.prefill == "stream":
            raise PykernelsError(
                f"draft={self.draft!r} and prefill='stream': drafts are checked as prompts are"
                " read, and each such step would bring all experts to the GPU",
                "Leave prefill at auto, or draft at off",
            )
        for name in ("target_itl_ms", "ageing_seconds"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise PykernelsError(f"{name}={value!r}", "Give a positive number")
        if self.dual_batch not in (True, False, "auto"):
            raise PykernelsError(f"dual_batch={self.dual_batch!r}", "Give True, False or 'auto'")
        if self.prefill not in PREFILL:
            raise PykernelsError(f"prefill={self.prefill!r}", f"Give {', '.join(PREFILL)}")
        dense = self.dense_gib
        if dense != "auto" and (isinstance(dense, (str, bool)) or not 0 <= dense < math.inf):
            raise PykernelsError(f"dense_gib={dense!r}", "Give a number of GiB or 'auto'")
        cache = self.expert_cache
        if cache not in ("auto", "off"):
            if isinstance(cache, str):
                raise PykernelsError(f"expert_cache={cache!r}", "Give a number, 'auto' or 'off'")
            check_whole("expert_cache", cache, 0, MOST_EXPERTS)
        check_whole("expert_cache_swaps", self.expert_cache_swaps, 0, MOST_EXPERTS)
        _ = self.cache_policy
        if not isinstance(self.overlap, bool):
            raise PykernelsError(f"overlap={self.overlap!r}", "Give True or False")
        check_numa(self.numa)
        if self.kv_tokens is not None and self.kv_bytes is not None:
            raise PykernelsError(
                "kv_tokens and kv_bytes both give the size of the KV cache", "Give one of them"
            )

    @property
    def state_slots(self) -> int:
        """Slots of states: of sequences that run, and of snapshots."""
        more = self.max_num_seqs if self.snapshots is None else self.snapshots
        return self.max_num_seqs + (more if self.snapshot_spacing else 0)

    @property
    def snapshot_spacing(self) -> int:
        """``snapshot_tokens`` as it is meant."""
        return SNAPSHOT_TOKENS if self.snapshot_tokens is None else self.snapshot_tokens

    @property
    def drafter(self) -> MakeDrafter | None:
        """Makes what ``draft`` is, for one output."""
        return DRAFTERS.get(self.draft)

    @property
    def num_logits(self) -> int | None:
        """``max_num_logits``, or as many as drafts take; None: one per sequence."""
        if self.max_num_logits is not None or self.draft == "off":
            return self.max_num_logits
        return self.max_num_seqs * (1 + self.draft_tokens)

    @property
    def cache_policy(self) -> CachePolicy:
        """What ``expert_cache_policy`` and ``expert_cache_swaps`` are."""
        return CachePolicy(self.expert_cache_policy, self.expert_cache_swaps)


def check_drafts(most: int, sizes: object) -> None:
    """Raises PykernelsError if a step of these sizes, those that are given, has no room for one
    sequence with so many drafts."""
    for name in ("max_num_batched_tokens", "max_num_logits"):
        room = getattr(sizes, name)
        if room is not None and most >= room:
            raise PykernelsError(
                f"draft_tokens={most}: a step must have room for them and the token before them,"
                f" and {name} is {room}",
                f"Give {room - 1} drafts or fewer, or a larger {name}"
                if room > 1
                else f"Give a larger {name}",
            )


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raises PykernelsError unless a setting is a whole number from ``least`` to ``most``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:  # type: ignore[operator]
        raise PykernelsError(f"{name}={value!r}", f"Give a whole number from {least} to {most}")
