"""Cloud-grade SLOs on local machines (OSDI 2026): figures 13 to 17 and table 1."""

from __future__ import annotations

from .cells import ABOUT, FIT, LESS, Cell
from .on import run
from .osdi_text import BATCH_GAIN, SLP_MOST_TOK_S, TTFT_LIMIT_S

TITLE = "Cloud-grade SLOs for local MoE inference (OSDI 2026)"
ABOUT_IT = (
    "One efficiency is taken from the paper: the share of main memory's rate that experts reach, so"
    " that DeepSeek-R1 in FP8 decodes 21.5 tok/s."
    f" {FIT} DeepSeek-R1 has DeepSeek-V3's shapes. Our program"
    " keeps a whole layer's experts on the GPU while it streams, 11 GiB of these, so"
    " that a step has"
    " fewer tokens beside them than the paper's and crosses more often: that is what"
    " the prompts show."
    " Two GPUs of one prompt (DSLP, SmallEP) are not ours yet.",
)
NODE = "osdi26-5090"


def cells() -> list[Cell]:
    """All of them."""
    return [*_prompts(), *_full(), *_batches(), *_quantized()]


def _prompts() -> list[Cell]:
    found = []
    speeds = {}
    for tokens in (4096, 8192, 16384, 32768, 65536):
        prompt = run("deepseek-v3", "fp8", NODE, prompt=tokens, way="stream").prompt
        speeds[tokens] = prompt.tok_s
        found.append(Cell("Figure 13", f"SLP, {tokens} tokens", "tok/s prompt", None, prompt.tok_s))
        says = LESS if tokens == 32768 else ""
        told = TTFT_LIMIT_S if tokens == 32768 else None
        found.append(
            Cell("Figure 14", f"SLP, {tokens} tokens", "s", told, prompt.seconds, says=says)
        )
    found.append(
        Cell(
            "Figure 13",
            "SLP, the most",
            "tok/s prompt",
            SLP_MOST_TOK_S,
            max(speeds.values()),
            says=ABOUT,
        )
    )
    return found


def _full() -> list[Cell]:
    found = []
    for tokens, told in ((1024, 21.5), (8192, None), (32768, 20.0)):
        step = run("deepseek-v3", "fp8", NODE, context=tokens)
        found.append(
            Cell(
                "Figure 15", f"DeepSeek-R1 fp8, context {tokens}", "tok/s", told, step.decode_tok_s
            )
        )
    step = run("kimi-k2", "fp8", NODE, context=1024)
    found.append(Cell("Figure 15", "Kimi-K2 fp8, context 1024", "tok/s", 22.4, step.decode_tok_s))
    for tokens, told in ((1024, 33.6), (32768, 31.1)):
        step = run("deepseek-v3", "fp8", NODE, context=tokens, batch=2, dual=True)
        what = f"DeepSeek-R1 fp8, two sequences in two microbatches, context {tokens}"
        found.append(Cell("Figure 15", what, "tok/s", told, step.decode_tok_s))
    return found


def _batches() -> list[Cell]:
    one = run("deepseek-v3", "fp8", NODE, context=1024).decode_tok_s
    found = []
    for batch in (2, 4, 6):
        told = BATCH_GAIN[batch]
        lanes = [
            run("deepseek-v3", "fp8", NODE, context=1024, batch=batch, dual=d)
            for d in (False, True)
        ]
        best = max(each.decode_tok_s for each in lanes)
        found.append(Cell("Figure 16", f"batch {batch} over batch 1", "x", told, best / one))
    return found


def _quantized() -> list[Cell]:
    found = []
    for tokens, told in ((1024, 28.0), (8192, 28.0), (32768, None), (131072, 19.0)):
        step = run("deepseek-v3", "q4_k", NODE, context=tokens)
        what = f"DeepSeek-R1 q4_k, context {tokens}"
        found.append(Cell("Figure 17", what, "tok/s", told, step.decode_tok_s))
    return found
