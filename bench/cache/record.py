"""What a model's routers choose for some sequences, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import model
from model.embedded.corpus import default_stdlib, find_sources, split
from pykernels.errors import PykernelsError
from runtime.engine import Engine, SamplingParams
from runtime.experts.cache.simulate import Recording
from runtime.planning.config import ExecutionConfig
from runtime.profiling.engine_speed import Load

from ..e2e.ours import Ours

LETTERS = 8
"""Most letters of a token: how much of a file is read for it."""


def source_texts(folder: Path, count: int, tokens: int) -> list[list[int]]:
    """Token ids of files of Python's library that the embedded model was not trained on.

    Raises:
        PykernelsError: too few of them are so long.
    """
    tokenizer = model.load_tokenizer(folder)
    texts: list[list[int]] = []
    for file in split(find_sources(default_stdlib())).heldout:
        ids = tokenizer.encode(file.text[: LETTERS * tokens])[:tokens]
        if len(ids) == tokens:
            texts.append([int(token) for token in ids])
        if len(texts) == count:
            return texts
    raise PykernelsError(
        f"{len(texts)} texts of {tokens} tokens, {count} are wanted", "Ask for fewer or shorter"
    )


def random_texts(vocab: int, count: int, tokens: int) -> list[list[int]]:
    """Random token ids."""
    ids = np.random.default_rng(0).integers(0, vocab, (count, tokens))
    return [row.tolist() for row in ids]


def record(
    ours: Ours, texts: Sequence[Sequence[int]], prompt: int, execution: ExecutionConfig
) -> Iterator[Recording]:
    """The choices of each text, of which ``prompt`` tokens are read at once, the others one by one.

    What a router chooses for a token does not depend on that, so all are computed at once.

    Raises:
        PykernelsError: a model without routed experts, or with too few positions.
    """
    longest = max(map(len, texts))
    timer = ours.timer(Load(longest, 1), execution)
    try:
        timer.close()
        with Engine(timer.runner, threaded=False) as engine:
            if not timer.runner.routed_layers:
                raise PykernelsError(f"{ours.name} has no routed experts", "Give an MoE model")
            params = SamplingParams(
                temperature=0, max_tokens=1, ignore_eos=True, routed_experts=True
            )
            for text in texts:
                [result] = engine.generate([text], params)
                routed = result.completions[0].routed_experts
                assert routed is not None
                # Behind a prefix that two texts share, the log begins later.
                yield Recording(routed.ids, prompt - routed.first)
    finally:
        timer.runner.close()
