"""Times conversations on two engines, one after the other, over one directory of blocks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from model.hub import local
from model.llm import LLM, meta_decoder
from model.load import load_engine
from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams
from runtime.engine.scheduling.config import SNAPSHOT_TOKENS
from runtime.kv_cache.layout import PAGE
from runtime.kv_cache.page_store import Kind
from runtime.kv_tiers.blocks.directory import blocks
from runtime.planning.config import ExecutionConfig

COMPUTED = 17
"""Tokens behind the last full page."""
ANSWER = 100
"""Tokens of the answer in front of a second turn: more than a page."""
_SNAPSHOTS = 8
"""Of a conversation, at least: those of its prompt, which are further apart if it is long, and the
end of its answer."""
_NEAR = SNAPSHOT_TOKENS // 4
"""Tokens that a snapshot may lie in front of a prompt's last full page."""


def timed(
    path: Path,
    execution: ExecutionConfig,
    tokens: int,
    conversations: int,
    folder: Path,
    message: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds to the first token, medians of so many conversations, and what they are of each
    other.

    Args:
        tokens: of each, at most; ``folder``: an empty directory.
        message: tokens of a second turn, behind an answer of ``ANSWER`` tokens.

    Raises:
        PykernelsError: as ``load_engine``; blocks were not found again.
        OSError: of the directory.
    """

    def opened(fitting: int = conversations + 2, ram: float = 0.0) -> LLM:
        """With pages for so many conversations."""
        longest = min(tokens + PAGE + more, most)
        sizes: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": 1}
        sizes |= {"kv_tokens": fitting * longest + PAGE, "kv_ram_gib": ram}
        if has_states:
            sizes["snapshots"] = _SNAPSHOTS * (conversations + 2)
        return load_engine(path, execution=execution, kv_disk=folder, **sizes)

    more, most = ANSWER + message, _positions(path)
    has_states = bool(meta_decoder(local(path)).states)
    length = (min(tokens, most - 1 - more) - COMPUTED) // PAGE * PAGE + COMPUTED
    if length <= COMPUTED:
        raise PykernelsError(
            f"the model has {most} positions, for a conversation and {more} tokens behind it",
            "Give a smaller --turn",
        )
    rng = random.Random(1)
    page_end = length - COMPUTED
    cached = range(max(1, page_end - _NEAR) if has_states else page_end, page_end + 1)
    with opened() as llm:
        prompts = [_tokens(rng, llm, length) for _ in range(conversations)]
        _first(llm, _tokens(rng, llm, length))  # compiles
        progress("reading conversations …")
        cold = [_first(llm, prompt) for prompt in prompts]
        progress("going on with them …")
        turns = [_second_turn(llm, prompt, _tokens(rng, llm, message)) for prompt in prompts]
    _forget(folder)
    progress("starting again …")
    with opened() as llm:
        _first(llm, _tokens(rng, llm, length))
        disk = [_first(llm, prompt, cached) for prompt in prompts]
        level = llm.engine.stats.kv_levels["disk"]
        memory = [_first(llm, prompt, cached) for prompt in prompts]
        page_bytes = llm.runner.page_store().nbytes(Kind.PAGE)
        name = llm.runner.model.name
    seconds = {"cold": median(cold), "disk": median(disk), "memory": median(memory)}
    seconds["turn"] = median(turn for turn, _ in turns)
    if execution.device != "cpu":  # else pages are in main memory
        progress("main memory …")
        nbytes = (conversations + 2) * -(-length // PAGE) * page_bytes
        with opened(fitting=1, ram=2 * nbytes / 2**30) as llm:
            for prompt in prompts:
                _first(llm, prompt, cached)
            seconds["ram"] = median([_first(llm, prompt, cached) for prompt in prompts])
    return {
        "model": name,
        "device": execution.device,
        "tokens": length,
        "turn_tokens": message,
        "turn_computed_tokens": max(computed for _, computed in turns),
        "conversations": conversations,
        "page_bytes": page_bytes,
        **{f"{of}_s": round(s, 6) for of, s in seconds.items()},
        **{f"{of}_over_cold": round(s / seconds["cold"], 4) for of, s in seconds.items()},
        "read_gbps": round(level.read_bytes / level.read_seconds / 1e9, 3),
    }


def _positions(path: Path) -> int:
    from model.checkpoint.config import read_config

    return int(read_config(path).max_position_embeddings)


def _tokens(rng: random.Random, llm: LLM, length: int) -> list[int]:
    return rng.choices(range(llm.runner.vocab_size), k=length)


def _first(llm: LLM, prompt: list[int], cached: range = range(1)) -> float:
    """Seconds to the first token.

    Args:
        cached: tokens that may come from the cache.

    Raises:
        PykernelsError: another part of the prompt was cached.
    """
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (answer,) = llm.engine.generate([prompt], params)[0].completions
    stats = answer.stats
    if stats.cached_tokens not in cached:
        wrong = f"{stats.cached_tokens} tokens of a conversation were cached, not {cached[-1]}"
        if any(level.declined for level in llm.engine.stats.kv_levels.values()):
            wrong += ": the engine computes them, which takes less time here than reading them"
            raise PykernelsError(wrong, "Give a larger --model")
        raise PykernelsError(wrong, "Give fewer tokens, or a larger disk")
    assert stats.time_to_first_token is not None
    return stats.time_to_first_token


def _second_turn(llm: LLM, prompt: list[int], message: list[int]) -> tuple[float, int]:
    """Seconds to the first token behind a conversation's answer and a message, and how many tokens
    were computed for it."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    (answer,) = llm.engine.generate([prompt], params)[0].completions
    params = replace(params, max_tokens=1)
    turn = [*prompt, *answer.token_ids, *message]
    before = llm.engine.stats.computed_tokens
    (found,) = llm.engine.generate([turn], params)[0].completions
    assert found.stats.time_to_first_token is not None
    return found.stats.time_to_first_token, llm.engine.stats.computed_tokens - before


def _forget(folder: Path) -> None:
    """Takes the blocks out of the page cache: they are read from the disk next."""
    for file in blocks(folder):
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
