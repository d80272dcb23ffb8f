"""A loaded Hugging Face model's own ``generate``, with the engine as its loop.

    lm = model.from_pretrained(path)
    lm.generate(**inputs, custom_generate=model.custom_generate, max_new_tokens=64)

transformers prepares the inputs and the generation config as ever and hands the loop over.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams
from runtime.engine.scheduling.config import CONTEXT
from runtime.make_runner import make_plan, make_runner
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import largest_step
from runtime.program.weights import WeightStore
from runtime.workers.matrix import packer
from runtime.workers.pool import WorkerPool

from .architectures.decoder import make_decoder
from .architectures.schema import loaded_schema
from .architectures.weights import LoadedWeights
from .llm import LLM
from .text.settings import engine_settings


def engine_of(lm: PreTrainedModel, threads: int | None = None) -> LLM:
    """The engine of a loaded model, made once: its dense weights are packed beside it, as bfloat16.

    Raises:
        PykernelsError: a model that the engine cannot run.
    """
    llm: LLM | None = lm.__dict__.get("_pykernels_engine")
    if llm is None:
        pool = WorkerPool(threads)
        try:
            store = WeightStore(LoadedWeights(lm), packer(pool))
            decoder = make_decoder(lm, loaded_schema(lm), store)
            context = min(CONTEXT, int(lm.config.max_position_embeddings))
            plan = make_plan(ExecutionConfig(), decoder, context, largest_step(context))
            llm = LLM(make_runner(plan, "cpu", decoder, pool), lm.config, None, (), pool)
        except BaseException:
            pool.close()
            raise
        lm.__dict__["_pykernels_engine"] = llm
    return llm


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    **others: Any,
) -> torch.Tensor:
    """Continues every row; the engine runs them together.

    Args:
        input_ids: int64 [B, P].
        generation_config: sampling or greedy, with what ``text.settings`` gives the engine.
        others: of these ``attention_mask`` [B, P], 0 for padding on the left, and ``streamer``,
            which gets the tokens of a single row. (Named, transformers would give them twice.)

    Returns:
        int64 [B, P + new tokens], rows that ended before filled up with the pad token.

    Raises:
        PykernelsError: beams, several sequences a row, or other things that the engine does not do.
    """
    config, attention_mask = generation_config, others.get("attention_mask")
    streamer = others.get("streamer")
    llm, (B, P) = engine_of(model), input_ids.shape
    eos = config.eos_token_id
    ends = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]
    settings = engine_settings(config, ends, llm.runner.vocab_size, text=False)
    for name, value in settings.not_done.items():
        raise PykernelsError(
            f"the engine does not generate with {name}={value}", "Leave custom_generate out"
        )
    params = settings.params(
        P,
        max_tokens=int(config.max_length) - P,
        stop_token_ids=ends,
        # From torch's own state, so that torch.manual_seed decides it.
        seed=int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")),
        **({} if config.do_sample else {"temperature": 0}),
    )
    masks = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, masks, strict=True)]
    if streamer is None:
        outputs = [list(result.token_ids) for result in llm.engine.generate(prompts, params)]
    else:
        outputs = [_streamed(llm, prompts[0], params, streamer, input_ids)]
    pad = config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    longest = max(len(output) for output in outputs)
    rows = [output + [int(pad)] * (longest - len(output)) for output in outputs]
    return torch.cat([input_ids, input_ids.new_tensor(rows).view(B, longest)], dim=1)


def _streamed(
    llm: LLM, prompt: list[int], params: SamplingParams, streamer: Any, input_ids: torch.Tensor
) -> list[int]:
    """One row, its tokens put into a streamer as they come; ``generate`` has put the prompt."""
    if len(input_ids) != 1:
        raise PykernelsError("a streamer takes one sequence", "Generate without it")
    tokens: list[int] = []
    for chunk in llm.engine.stream(prompt, params):
        tokens += chunk.token_ids
        for token in chunk.token_ids:
            streamer.put(torch.tensor([token], dtype=torch.int64, device="cpu"))
    streamer.end()
    return tokens
