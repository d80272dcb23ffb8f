"""End to end: greedy text from the embedded model, tokens per second of prefill and decode."""

from __future__ import annotations

import pytest

import model
from model.text.generate import generate_stream
from runtime.machine.topology import Topology

PROMPT = "def quicksort(xs):"
TOKENS = 64


@pytest.fixture(scope="module")
def embedded(kernel: str):
    lm = model.from_pretrained(model.EMBEDDED, kernel=kernel)
    return lm, model.load_tokenizer(model.EMBEDDED)


def bench_generate(benchmark, embedded) -> None:
    lm, tokenizer = embedded
    runs = []

    def run() -> None:
        stream = generate_stream(lm, tokenizer, PROMPT, max_new_tokens=TOKENS)
        "".join(stream)
        runs.append(stream.stats)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    best = sorted(runs, key=lambda s: s.decode_tokens_per_second)[len(runs) // 2]
    benchmark.extra_info.update(
        threads=Topology.detect().usable,
        tok_per_s=best.decode_tokens_per_second,
        gbps=best.read_gb_per_second,
    )
