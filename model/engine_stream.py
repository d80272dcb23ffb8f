"""Streamed text from the engine, with the figures of the run: as `generate.GenerationStream`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.engine import SamplingParams

from .llm import LLM
from .text.generate import GenerationStats, check_options


class EngineStream:
    """Iterator of text pieces; has `stats` once it has ended (also when it was closed early). Of
    several at once drafts are counted together."""

    def __init__(self, llm: LLM, prompt_ids: list[int], params: SamplingParams) -> None:
        self._llm, self._before = llm, _drafts(llm)
        self._handle = llm.submit(prompt_ids, params)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._handle).text

    def close(self) -> None:
        """Stop now."""
        if not self._handle.finished:
            self._handle.cancel()
            for _ in self._handle:
                pass

    @property
    def stats(self) -> GenerationStats:
        """Figures of the run."""
        stats = self._handle.result().completions[0].stats
        drafts, accepted = (
            now - before for now, before in zip(_drafts(self._llm), self._before, strict=True)
        )
        steps = max(0, stats.new_tokens - 1) if not drafts else 0
        return GenerationStats(
            prompt_tokens=stats.prompt_tokens,
            new_tokens=stats.new_tokens,
            prefill_seconds=stats.time_to_first_token or 0.0,
            decode_seconds=stats.decode_seconds,
            read_bytes=steps * self._llm.runner.weight_bytes,
            read_seconds=stats.decode_seconds if steps else 0.0,
            reads="weights",
            draft_tokens=drafts,
            accepted_tokens=accepted,
        )


def _drafts(llm: LLM) -> tuple[int, int]:
    """Drafts that the engine's steps have checked, and those that were right."""
    stats = llm.engine.stats
    return stats.draft_tokens, stats.accepted_tokens


def engine_stream(
    llm: LLM,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
) -> EngineStream:
    """Continue `prompt`; the arguments of `generate.generate_stream`. All other settings are those
    of the checkpoint's generation config, as far as the engine has them.

    Raises:
        PykernelsError: as that.
    """
    check_options(max_new_tokens, temperature, top_p, top_k, seed)
    ids = llm.encode(prompt)
    params = llm.settings.params(
        len(ids),
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=None if seed is None else seed % 2**63,
    )
    return EngineStream(llm, ids, params)
