"""The eager forward, transformers' own loop: prompts and decode, to compare the engine with.

python -m bench.e2e.eager ARCH LAYERS EXPERTS VOCAB THREADS CASES

times transformers' own model of an architecture, random bfloat16 weights, in a process of its own.
CASES is a JSON list of [op, tokens, batch, context]; what it prints, one of tokens a second.
0 stands for the architecture's own number.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from model.pretrained import build_meta
from model.random_model import check_memory
from pykernels.errors import PykernelsError

from .ours import Shape


def random_eager(name: str, config: PretrainedConfig) -> Any:
    """transformers' own model of a configuration, random bfloat16 weights.

    Raises:
        PykernelsError: no memory for it.
    """
    check_memory(name, config, "bf16")
    lm: Any = build_meta(config, torch.bfloat16)
    lm.to_empty(device="cpu")
    for parameter in lm.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim < 2:
            parameter.fill_(1.0)
        else:
            _tile(parameter)
    for buffer in lm.buffers():  # a router's bias
        buffer.zero_()
    inner = lm.model
    inner.rotary_emb = type(inner.rotary_emb)(config)  # its frequencies were empty too
    return lm.eval()


def prefill(lm: Any, tokens: int) -> float:
    """Tokens a second of one prompt of random tokens."""
    ids = torch.randint(0, lm.config.vocab_size, (1, tokens))
    with torch.no_grad():
        start = time.perf_counter()
        lm(ids, use_cache=True, logits_to_keep=1)
        return tokens / (time.perf_counter() - start)


def decode(lm: Any, batch: int, context: int, tokens: int) -> float:
    """Tokens a second of ``batch`` sequences that are ``context`` tokens long."""
    ids = torch.randint(0, lm.config.vocab_size, (batch, context))
    with torch.no_grad():
        out = lm(ids, use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(tokens):
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = lm(ids, past_key_values=out.past_key_values, use_cache=True)
        return batch * tokens / (time.perf_counter() - start)


def eager_speed(
    lm: Any, prompt: int, tokens: int, batch: int, context: int, rounds: int = 3
) -> dict[str, float]:
    """``eager_prefill_tok_s`` and ``eager_decode_tok_s``, medians, the first round not counted."""
    prefill(lm, min(prompt, 16))
    decode(lm, batch, min(context, 16), 2)
    prompts = [prefill(lm, prompt) for _ in range(rounds)]
    steps = [decode(lm, batch, context, tokens) for _ in range(rounds)]
    return {
        "eager_prefill_tok_s": round(median(prompts), 2),
        "eager_decode_tok_s": round(median(steps), 2),
    }


def _tile(parameter: torch.Tensor) -> None:
    """Fills with 128 random rows again and again: only bytes count."""
    rows = parameter.view(-1, parameter.shape[-1])
    base = (torch.randn(min(128, len(rows)), rows.shape[1]) / rows.shape[1] ** 0.5).bfloat16()
    for at in range(0, len(rows), len(base)):
        part = rows[at : at + len(base)]
        part.copy_(base[: len(part)])


def main(arguments: list[str]) -> int:
    arch, layers, experts, vocab, threads, cases = arguments
    torch.set_num_threads(int(threads))
    try:
        shape = Shape(arch, int(layers) or None, int(experts) or None, int(vocab) or None)
        lm = random_eager(arch, shape.config())
    except PykernelsError as error:
        print(error, file=sys.stderr)
        return 2
    prefill(lm, 16)
    decode(lm, 1, 16, 2)
    rates = [
        prefill(lm, tokens) if op == "prefill" else decode(lm, batch, context, tokens)
        for op, tokens, batch, context in json.loads(cases)
    ]
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
