"""From the outcomes of requests to the figures of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .client import Outcome
from .workload import Load

PERCENTILES = (50, 90, 99)
BUSY = 429


def figures(
    load: Load,
    outcomes: Sequence[Outcome],
    ttft_limit: float | None = None,
    itl_limit: float | None = None,
) -> dict[str, Any]:
    """One flat row.

    Latencies, tokens and rates are of answers that came to their end; milliseconds are `*_ms_pNN`.
    `itl` is each gap between two pieces of a stream (a piece is a token, unless the server joins
    several), `tpot` each answer's time after its first piece over its tokens after the first, and
    `e2e` its time as a whole. Rates are over `seconds`, from the first arrival to the last end.

    Args:
        load: how the server was driven.
        outcomes: of all requests.
        ttft_limit: seconds; an answer whose first token comes later does not count as goodput.
        itl_limit: milliseconds; nor does one whose `tpot` is longer.
    """
    whole = [one for one in outcomes if one.whole]
    refused = sum(one.status == BUSY for one in outcomes)
    failed = [one for one in outcomes if one.error and one.status != BUSY]
    seconds = max(one.ended for one in outcomes) - min(one.begun for one in outcomes)
    prompt_tokens = sum(one.prompt_tokens for one in whole)
    output_tokens = sum(one.output_tokens for one in whole)
    given = asdict(load)
    if load.rate == float("inf"):
        given["rate"] = "inf"  # JSON has no infinity
    row: dict[str, Any] = {
        **given,
        "seconds": seconds,
        "completed": len(whole),
        "cancelled": sum(one.cancelled for one in outcomes),
        "refused_429": refused,
        "errors": len(failed),
        "why": _most_common(failed),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_share": sum(one.cached_tokens for one in whole) / max(1, prompt_tokens),
        "requests_s": len(whole) / seconds,
        "input_tok_s": prompt_tokens / seconds,
        "output_tok_s": output_tokens / seconds,
    }
    with_text = [one for one in whole if one.pieces]
    gaps = [b - a for one in with_text for a, b in zip(one.pieces, one.pieces[1:], strict=False)]
    row |= _percentiles("ttft", [one.ttft for one in with_text])
    row |= _percentiles("itl", gaps)
    row |= _percentiles("tpot", [t for one in whole if (t := one.token_seconds) is not None])
    row |= _percentiles("e2e", [one.ended - one.begun for one in whole])
    good = sum(_is_good(one, ttft_limit, itl_limit) for one in whole)
    limits = ttft_limit is not None or itl_limit is not None
    row |= {
        "ttft_limit_s": ttft_limit,
        "itl_limit_ms": itl_limit,
        "good": good if limits else None,
        "goodput_requests_s": good / seconds if limits else None,
    }
    return row


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {f"{name}_ms_p{p}": None for p in PERCENTILES}
    values = np.percentile(np.asarray(seconds, dtype=np.float64), PERCENTILES)
    return {f"{name}_ms_p{p}": float(v) * 1e3 for p, v in zip(PERCENTILES, values, strict=True)}


def _is_good(one: Outcome, ttft_limit: float | None, itl_limit: float | None) -> bool:
    if ttft_limit is not None and (not one.pieces or one.ttft > ttft_limit):
        return False
    a_token = one.token_seconds
    return itl_limit is None or a_token is None or a_token * 1e3 <= itl_limit


def _most_common(failed: Sequence[Outcome]) -> str:
    if not failed:
        return ""
    (status, error), _ = Counter((one.status, one.error) for one in failed).most_common(1)[0]
    return f"{status}: {error}" if status not in (0, 200) else error
