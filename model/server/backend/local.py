"""A model whose engine runs in the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

from runtime.engine import AsyncRequestHandle, SamplingParams
from runtime.kv_cache.prefix import Held
from runtime.kv_tiers.transfer.endpoint import Peer
from runtime.tracing.recorder import Recorder

from ...llm import LLM
from ...text.detokenize import Detokenizer
from ..http.frames import json_bytes
from .interface import ConfigFacts, Figures, ModelFacts
from .parts import parts
from .timeline import timeline_body

_CACHE_COUNTS = "choices", "hits", "swaps"


class LocalModel:
    """See ``ServedModel``. The caller closes ``llm``."""

    trouble, recovers = "the engine has failed", False

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer, self.facts = llm, llm.tokenizer, facts_of(llm)

    def attach(self) -> None:
        """The engine finds the loop of each request by itself."""

    async def detach(self) -> None:
        """Nor has it anything to end."""

    @property
    def healthy(self) -> bool:
        return self.llm.engine.healthy

    def asubmit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        special: Collection[str],
        drawn: Sequence[int] = (),
    ) -> AsyncRequestHandle:
        detokenizer = None
        if special and self.tokenizer is not None:
            detokenizer = partial(Detokenizer, self.tokenizer, special)
        engine = self.llm.engine
        return engine.asubmit(prompt_ids, params, detokenizer=detokenizer, drawn=drawn)

    async def held(self, keys: Sequence[bytes]) -> Held:
        return self.llm.engine.held(keys)

    def meet(self, peers: Sequence[Peer]) -> None:
        self.llm.engine.meet(peers)

    async def figures(self) -> Figures:
        return figures_of(self.llm)

    def observe(self, steps: int, title: str) -> tuple[Future[None], Callable[[], bytes]]:
        recorder = Recorder(self.llm.runner, title)
        done = self.llm.engine.observe(recorder, steps)
        return done, lambda: json_bytes(timeline_body(recorder.timeline()))


def facts_of(llm: LLM) -> ModelFacts:
    """What stays as it is of a model that an engine has."""
    runner, engine, shares = llm.runner, llm.engine, llm.engine.handover
    program = runner.decode_steps[0].program if runner.decode_steps else None
    device_parts = () if program is None else parts(program, runner.expert_slots)
    return ModelFacts(
        config=ConfigFacts(llm.config.model_type, getattr(llm.config, "bos_token_id", None)),
        settings=llm.settings,
        longest=llm.longest,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        max_num_seqs=engine.config.max_num_seqs,
        ageing_seconds=engine.config.ageing_seconds,
        num_pages=runner.num_pages,
        page_size=runner.page_size,
        routed_layers=tuple(runner.routed_layers),
        workers=0 if runner.pool is None else runner.pool.threads,
        devices=tuple(part.device for part in device_parts),
        parts=device_parts,
        kv_model=engine.kv_model,
        ways=() if shares is None else shares.ways,
        peer=None if shares is None or shares.transfer is None else shares.transfer.peer,
    )


def figures_of(llm: LLM) -> Figures:
    """The counts as they are now. Which experts a token chooses is not asked: for several tokens
    their number is what it is where each chooses at random."""
    stats = llm.engine.stats
    every = experts = 0
    for tokens, steps in stats.decode_steps.items():
        all_of_step, experts_of_step = llm.runner.read_bytes(tokens)
        every, experts = every + steps * all_of_step, experts + steps * experts_of_step
    cache = llm.expert_cache
    counts = {} if cache is None else {name: getattr(cache, name) for name in _CACHE_COUNTS}
    return Figures(stats, llm.runner.weight_bytes, every, experts, counts, speed=llm.speed)
