"""What a user of the engine chooses: sizes of a step, the KV cache, and how requests share both.

On which devices a model runs, and how, is ``planning.config.ExecutionConfig``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pykernels.errors import PykernelsError

from ...planning.option import SettingError, check_number, check_one_of, check_whole, option
from .draft_limits import AUTO, AUTO_ROWS, DRAFTERS, MOST_DRAFTS, UNASKED_TOKENS, check_drafts
from .routing_policy import DSLP_AFTER, RoutingPolicy

if TYPE_CHECKING:
    from ...planning.config import ExecutionConfig
    from ..requests.drafters import MakeDrafter

CONTEXT = 8192
"""Default ``max_model_len``, if the model has as many positions."""

STEP_TOKENS = 512
"""Token budget of a step where weights lie in main memory."""

SNAPSHOT_TOKENS = 1024
"""From one snapshot of a prompt's state to the next. Each takes as much memory as the keys and
values of some thousand tokens, and makes one step more of the prompt."""

TRANSFER_GIB = 1.0
PREFILL_YIELD = 0.5
"""A long prompt takes twice as long at most, besides what it waits for anyway."""

MOST = {
    "max_num_batched_tokens": 1 << 16,  # each buffer of a step has room for all
    "max_num_seqs": 1 << 12,
    "max_num_logits": 1 << 16,
    "max_model_len": 1 << 31,
    "kv_tokens": 1 << 40,
    "kv_bytes": 1 << 50,
    "max_partial_prefills": 1 << 12,
    "max_waiting": 1 << 31,
    "chunked_below": 1 << 31,
    "snapshot_tokens": 1 << 31,
    "snapshots": 1 << 16,
}
"""Largest values of whole numbers."""

_OR_NONE = ("max_waiting", "snapshot_tokens", "snapshots")
"""Names of these that may be 0."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; each is checked when the object is made.

    Attributes:
        max_num_batched_tokens: token budget of a step; None: ``STEP_TOKENS``, and on a GPU that
            holds all experts, or to which they are streamed, as many as its memory allows, up to
            4,096, and 65,536 where experts cross a link.
        max_num_seqs: most sequences that run at once.
        max_num_logits: rows of logits that a step may compute; None: one per sequence, and one
            for each draft. Logprobs of prompt tokens take one row each.
        max_model_len: longest sequence in tokens; None: the model's, at most 8,192.
        kv_tokens: size of the KV cache in tokens, rounded up to pages; None: see ``kv_bytes``.
        kv_bytes: size of the KV cache in bytes; None with ``kv_tokens`` None: as many sequences
            of ``max_model_len`` as fit into an eighth of the free memory, two at least.
        kv_disk: directory of keys, values and states that outlive the process; None: none do.
        kv_disk_gib: GiB of all blocks in it; None: see ``kv_tiers.blocks.directory.prepared``.
        kv_ram_gib: GiB of main memory for the same with a GPU, in front of that directory.
        kv_store: address of the master of a Mooncake store, behind all that; None: none.
        kv_store_gib: GiB of main memory that the process lends to the store.
        kv_transfer: address of this machine at which other engines read its memory by Mooncake's
            Transfer Engine, with ``kv_shared``; None or "off": they do not.
        kv_transfer_gib: GiB of main memory that they read; None: one.
        kv_shared: other engines wait for what this one reads, and it for what they do: pages go to
            the level behind all others as soon as they are filled, and it is asked for each block.
        snapshot_tokens: of a model whose layers have a state of each sequence: tokens of a prompt
            from one snapshot of its state to the next; with another at its end and at the end of
            the output. A prompt that begins like an earlier one is read from a snapshot on. None:
            1,024, or as many as a step has where all experts cross to a GPU in each; 0: no
            snapshots.
        snapshots: that are kept besides the states of running sequences, the most recently used
            ones; None: as many as ``max_num_seqs``.
        target_itl_ms: inter-token time to keep while a prompt is read in parallel with running
            decodes; the prompt tokens of such a step are capped by measured step times. None: no
            cap; half a second where long prompts have steps of their own that yield.
        max_partial_prefills: prompts that may be under way in one step.
        chunked_below: prompts of fewer tokens are read in chunks beside the requests that decode,
            where longer ones have steps of their own on a GPU; None: as is measured.
        dslp_after: seconds without decoding after which all GPUs read a prompt together, where
            they may; before that those on which nothing decodes.
        prefill_yield: of the time of a long prompt's step, the share in which it may be parked
            between layers while shorter prompts are read; 0: never, and they go by order.
        max_waiting: requests that may wait to be admitted; more are refused with ``EngineBusy``.
            None: no limit.
        ageing_seconds: a request that has waited so much longer than another is served as if its
            priority were better by one.
        draft: where drafts of an output's next tokens come from, all of which one step checks:
            "ngram": what came behind the same tokens before (prompt lookup); "auto": these too,
            where drafts of the output were right so often of late that more are worth their time;
            "off": there are none. What is drawn is the same, but where rounding decides. None:
            "auto" where no bit depends on drafts and it is predicted to pay, which who loads a
            model knows; else "off".
        draft_tokens: drafts of an output in a step, at most.
        draft_times: of "auto": times as long as a step without drafts those take that check 1, 2,
            ... of one sequence, as predicted; empty: by steps that have run alone.
        draft_step_tokens: tokens of a step with drafts, at most; None: as many as a step has.
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
    kv_disk: Path | None = option(
        None,
        "A directory for what leaves the KV cache: the same conversation is not read again after a"
        " restart.",
        "DIR",
        shown="none",
        read=Path,
    )
    kv_disk_gib: float | None = option(
        None,
        "Size of that directory, of all models together; what was of use least recently goes.",
        "GIB",
        kind=float,
        shown="32, or half of the room there",
        least=0,
    )
    kv_ram_gib: float = option(
        0.0,
        "Main memory beside a GPU for what leaves its KV cache; without a GPU, give more"
        " --kv-tokens.",
        "GIB",
        kind=float,
        least=0,
    )
    kv_store: str | None = option(
        None,
        "A Mooncake store behind all that, which other servers of the model share.",
        "mooncake://HOST:PORT",
        shown="none",
    )
    kv_store_gib: float = option(
        0.0, "Main memory that this server lends to the store.", "GIB", kind=float, least=0
    )
    kv_transfer: str | None = option(
        None,
        "Of a node: this machine's address, at which other nodes read its pages by Mooncake's"
        " Transfer Engine, without a store.",
        "ADDRESS|off",
        shown="--host, where Mooncake is installed and there is no --kv-store",
    )
    kv_transfer_gib: float | None = option(
        None, "Main memory that they read.", "GIB", kind=float, shown="1", least=0
    )
    kv_shared: bool = False
    snapshot_tokens: int | None = option(
        None,
        "Of a model with recurrent layers: tokens of a prompt between snapshots of its state, from"
        " which a later prompt is read on; 0: none.",
        "N",
        kind=int,
        shown="1024; a step's where experts cross to a GPU",
        least=0,
    )
    snapshots: int | None = None
    target_itl_ms: float | None = option(
        None, "Between two tokens, kept while prompts are read.", "MS", kind=float
    )
    max_partial_prefills: int = 4
    chunked_below: int | None = option(
        None,
        "Prompts of fewer tokens are read beside the answers that are written; longer ones have"
        " steps of their own, where their experts are streamed to a GPU.",
        "N",
        kind=int,
        shown="as is measured",
        least=1,
    )
    dslp_after: float = option(
        DSLP_AFTER,
        "With several GPUs, all of them read a prompt where no answer was written beside another"
        " one for so many seconds; before that those that write none.",
        "S",
        kind=float,
        least=0,
    )
    prefill_yield: float = option(
        PREFILL_YIELD,
        "Share of its time for which a long prompt whose experts are streamed to a GPU stands back"
        " for shorter ones; 0: they wait for it.",
        "SHARE",
        kind=float,
        least=0,
    )
    max_waiting: int | None = None
    ageing_seconds: float = 30.0
    draft: str | None = option(
        None,
        "Guess an output's next tokens, and check them in one step: by what came behind the same"
        " tokens before (ngram), or so where that pays (auto). The text is the same, but where"
        " rounding decides between two tokens; left open, that never happens.",
        "auto|ngram|off",
        shown="auto on a CPU where it is predicted to pay, else off",
    )
    draft_tokens: int = option(
        4, "Guessed tokens of an output in a step, at most.", "N", kind=int, least=1
    )
    draft_times: tuple[float, ...] = ()
    draft_step_tokens: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.kv_disk, str):  # as many would give it
            object.__setattr__(self, "kv_disk", Path(self.kv_disk))
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None or name == "max_num_seqs":
                check_whole(name, value, 0 if name in _OR_NONE else 1, most)
        check_whole("draft_tokens", self.draft_tokens, 1, MOST_DRAFTS)
        if self.draft is not None:
            check_one_of("draft", self.draft, (*DRAFTERS, AUTO, "off"))
        if self.draft in DRAFTERS:
            check_drafts(self.draft_tokens, self)
        for name in ("target_itl_ms", "ageing_seconds"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise SettingError(name, value, "Give a positive number")
        if not isinstance(self.overlap, bool):
            raise SettingError("overlap", self.overlap, "Give True or False")
        check_number("prefill_yield", self.prefill_yield, "a share from 0 to 0.9")
        if self.prefill_yield > 0.9:
            hint = "Give a share from 0 to 0.9"
            raise SettingError("prefill_yield", self.prefill_yield, hint)
        check_number("dslp_after", self.dslp_after, "a number of seconds")
        for name in ("kv_ram_gib", "kv_store_gib", "kv_transfer_gib"):
            check_number(name, getattr(self, name) or 0, "a number of GiB")
        if self.kv_store_gib and self.kv_store is None:
            hint = "Give its address as kv_store"
            raise SettingError("kv_store_gib", self.kv_store_gib, hint, "without a store")
        if self.kv_shared and not (self.kv_store or self.transfer_host or self.kv_disk):
            hint = "Give kv_transfer, kv_store or kv_disk"
            raise SettingError("kv_shared", True, hint, "without any of those")
        if self.kv_disk_gib is not None:
            check_number("kv_disk_gib", self.kv_disk_gib, "a number of GiB")
            if self.kv_disk is None:
                hint = "Name its directory as kv_disk"
                raise SettingError("kv_disk_gib", self.kv_disk_gib, hint, "without a directory")
        if self.kv_tokens is not None and self.kv_bytes is not None:
            raise PykernelsError(
                "kv_tokens and kv_bytes both give the size of the KV cache", "Give one of them"
            )

    def check_ways(self, execution: ExecutionConfig) -> None:
        """Raises SettingError for a choice among ways of prompts of which there is one."""
        on_gpu = execution.on_gpu and execution.experts != "gpu"
        ways = on_gpu and execution.prefill == "auto", on_gpu and execution.prefill != "cpu"
        hint = 'Add device="cuda:0", experts="cpu" and prefill="auto"'
        for name, own, there in (
            ("chunked_below", None, ways[0]),
            ("prefill_yield", PREFILL_YIELD, ways[1]),
        ):
            if (value := getattr(self, name)) != own and not there:
                raise SettingError(name, value, hint, "where no prompt has a step of its own")
        routed = "," in execution.device and execution.gpus in ("auto", "routed")
        if self.dslp_after != DSLP_AFTER and not (ways[1] and routed):
            hint = 'Add device="cuda:0,cuda:1" and gpus="routed"'
            raise SettingError("dslp_after", self.dslp_after, hint, "without a choice of GPUs")

    @property
    def transfer_host(self) -> str:
        """``kv_transfer`` as it is meant; "": there is none."""
        return self.kv_transfer if self.kv_transfer not in (None, "off") else ""

    @property
    def transfer_gib(self) -> float:
        """``kv_transfer_gib`` as it is meant."""
        given = TRANSFER_GIB if self.kv_transfer_gib is None else self.kv_transfer_gib
        return given if self.transfer_host else 0.0

    @property
    def routing_policy(self) -> RoutingPolicy:
        """Says which way a step of prompts takes."""
        return RoutingPolicy(self.chunked_below, self.dslp_after)

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
        from ..requests.drafters import PromptLookup

        return None if self.draft in (None, "off") else PromptLookup

    @property
    def num_logits(self) -> int | None:
        """``max_num_logits``, or as many as drafts take; None: one per sequence."""
        if self.max_num_logits is not None or self.draft == "off":
            return self.max_num_logits
        every = self.max_num_seqs * (1 + self.draft_tokens)
        if self.draft is None:
            return min(every, max(self.max_num_seqs, UNASKED_TOKENS))
        if self.draft == AUTO:  # drafts of many sequences at once do not pay
            return min(every, self.max_num_seqs + AUTO_ROWS)
        return every
