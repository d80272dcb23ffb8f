"""What the text of "Cloud-grade SLOs for local MoE inference" (OSDI 2026) says of its figures: two
RTX 5090 beside two EPYC 9355, DeepSeek-R1 in FP8. What is only drawn is not here."""

from __future__ import annotations

SLP_MOST_TOK_S, DSLP_MOST_TOK_S = 1200.0, 1800.0
"""Figure 13: "up to", and "over", so many tokens a second of a prompt."""
DSLP_OVER_SLP = 1.64
"""Figure 13, at 20,000 to 32,000 tokens."""
TTFT_LIMIT_S = 30.0
"""Figure 14: within it SLP reads 32,768 tokens and DSLP 45,000 (``WITHIN_LIMIT``)."""
WITHIN_LIMIT = {1: 32768, 2: 45000}
"""Tokens by number of GPUs."""

LAYER_TOKENS = 20000
"""Figure 3: tokens of one layer's step."""
EP_LAYER_TIME, SMALL_EP_OVER_EP = 0.79, 0.82
"""Figure 3: a layer's time on two GPUs over one, by standard expert parallelism (-21 %); by SmallEP
over that (-18 %)."""
EP_SHARE_SENT = 0.31
"""Figure 3: of a layer's time, what standard expert parallelism sends."""
SMALL_EP_BYTES = 0.5
"""Figures 3 and 6: about so many of standard expert parallelism's bytes."""

BATCH_GAIN = {1: 1.0, 2: 1.56, 4: 1.58, 6: 1.61}
"""Figure 16: tokens a second by batch, over batch 1; 21.5 there."""
PREFILL_TOKENS, DECODE_TOKENS, DECODE_PROMPT = 24 * 1024, 480, 10
"""Figure 18: of a prefill request; of an answer and of its prompt. Alone each takes 20 s."""
TTFT_OVER = {"1P": 1.0, "1P+2D": 1.18}
"""Figure 18: of the prefill request, over 1P; 1P+1D is "stable"."""
TPOT_MOST, TPOT_MOST_KT = 1.54, 2.45
"""Figure 18: the largest over 1D; of KTransformers."""
TOTAL_MOST, TOTAL_MOST_KT = 1.67, 2.53
"""Figure 18: the longest of all requests over the first workload; of KTransformers."""
EXPERTS_US, ATTENTION_US = 450.0, 350.0
"""Section 3.3.1: of a layer, its experts on the CPU, and attention."""
DECODE_TOK_S = {1024: 21.5, 32768: 20.0}
"""Figure 15, by context: DeepSeek-R1 in FP8; ``KIMI_TOK_S``: Kimi-K2, a short one;
``TWO_STREAMS_TOK_S``: two sequences in two microbatches."""
KIMI_TOK_S = 22.4
TWO_STREAMS_TOK_S = {1024: 33.6, 32768: 31.1}
Q4_TOK_S = {1024: 28.0, 8192: 28.0, 131072: 19.0}
"""Figure 17: DeepSeek-R1 in Q4_K_M by context."""
SLP_OVER_AVX = 10.0
"""Figure 13, at 20,000 to 32,000 tokens: "more than an order of magnitude"."""
TABLE_1 = {
    "OpenBLAS FP32": (69.5, 844.42),
    "AOCL-BLAS FP32": (59.2, 992.70),
    "AOCL-BLAS BF16": (69.5, 422.26),
    "theirs (standard) FP8": (21.7, 678.0),
    "theirs (optimized) FP8": (15.5, 947.1),
}
"""Table 1: us and GB/s of a matrix of 7168 x 2048 and one vector."""
