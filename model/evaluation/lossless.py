"""Perplexity with each pass that must not change a model on and off: SMOE's Table II.

Every way of computing a text is compared with the plainest one, token by token: one request after
another, each prompt whole in one step, nothing cached, nothing overlapped, experts in one place.
Sums in another order differ in their last digit, and so does what follows from it; how much that
may be is not guessed: it is what the plainest way itself differs by from the ``ref`` device, which
computes the same weights in float32. Two ways that do change the model, a cache in E4M3 and
deferral, are in the table as well, to show what the measure sees.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykernels.errors import PykernelsError
from runtime.engine import SamplingParams
from runtime.kv_cache.layout import PAGE
from runtime.passes.keep_routing import routers

from ..llm import LLM
from ..load import load_engine
from ..pretrained import load_tokenizer
from ..rules import Rules
from .forced import score
from .heldout import heldout

FLOAT32 = 64 * 2.0**-24
"""Root mean square of the differences of float32's own log-probabilities: some roundings."""
OF_ROUNDING = 2.0
"""Two ways may each be as far from the exact value as the plainest is: twice that between them."""
LEAST = 256
"""Tokens of a document: what follows its prompt takes two pages more, so that some do not fit."""
TAIL = 16
"""Tokens of a prompt that are scored behind what comes from the cache of prefixes."""


@dataclass(frozen=True)
class Way:
    """One way to compute the text.

    Attributes:
        settings: of ``load_engine``, in place of the plainest's.
        on: kinds of devices that have it: "cpu", "ref", "cuda".
        at_once: all documents side by side.
        again: each prompt was read before.
        lossless: whether it must not change the model.
        shown: what tells that it was at work, of the engine that ran it; "" if it was not.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    on: Sequence[str] = ("cpu", "ref", "cuda")
    at_once: bool = False
    again: bool = False
    lossless: bool = True
    shown: Callable[[LLM], str] = lambda llm: "-"


@dataclass(frozen=True)
class Row:
    """How one way's log-probabilities stand to the plainest's.

    Attributes:
        perplexity: of the tokens that were scored; ``plain``: the plainest's of the same tokens.
        rms, largest: of the differences of the tokens' natural log-probabilities.
        tokens: how many were scored.
        equal: bit for bit; ``within``: no further than the sums' order allows.
        shown: what tells that the way was at work.
        refused: why it could not be run here, else "".
    """

    name: str
    lossless: bool
    perplexity: float = math.nan
    plain: float = math.nan
    rms: float = math.nan
    largest: float = math.nan
    tokens: int = 0
    equal: bool = False
    within: bool = False
    shown: str = ""
    refused: str = ""

    @property
    def right(self) -> bool:
        """Whether it is as it must be: at work, and the same model where it has to be."""
        return bool(self.refused) or (self.within or not self.lossless) and self.shown != ""


@dataclass(frozen=True)
class Result:
    """What was computed where, and its rows.

    Attributes:
        allowed: the largest ``rms`` that the order of sums accounts for.
        prompt: tokens of each document that are read as a prompt; the others are written.
    """

    model: str
    device: str
    cpu: str
    python: str
    kernel: str
    documents: int
    length: int
    prompt: int
    heldout_sha256: str
    perplexity: float
    allowed: float
    rows: tuple[Row, ...]

    @property
    def right(self) -> bool:
        """Whether every row is as it must be."""
        return all(row.right for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def ways(device: str, length: int, documents: int, slots: int) -> list[Way]:
    """All ways that a kind of device has.

    Args:
        slots: of each layer on the device, for experts.
    """
    tight = (2 * -(-length // PAGE) - 1) * PAGE  # two prompts fit, but not all that follows them

    def preempted(llm: LLM) -> str:
        count = llm.engine.stats.preemptions
        return f"{count} preemptions" if count else ""

    def cached(llm: LLM) -> str:
        count = llm.engine.stats.cached_tokens
        return f"{count} tokens from the cache" if count else ""

    def swapped(llm: LLM) -> str:
        cache = llm.expert_cache
        return f"{cache.hit_rate:.0%} hits, {cache.swaps} swaps" if cache else ""

    def microbatches(llm: LLM) -> str:
        return "two microbatches" if llm.runner.dual_batch else ""

    gpu = ("ref", "cuda")
    every = [
        Way("chunked prompts", {"max_num_batched_tokens": PAGE}),
        Way("overlapped steps", {"overlap": True}),
        Way("requests side by side", at_once=True),
        Way("preemption", {"kv_tokens": tight}, at_once=True, shown=preempted),
        Way("prefix cache", again=True, shown=cached),
        Way("slices on 2 NUMA nodes", {"numa": 2}, ("cpu",)),
        Way("streamed prefill", {"prefill": "stream"}, gpu),
        Way("split prefill", {"prefill": "split"}, ("cuda",)),
        Way("expert cache", {"expert_cache": slots}, gpu, shown=swapped),
        Way("dual batch", {"dual_batch": True}, gpu, at_once=True, shown=microbatches),
        Way("experts on the GPU too", {"gpu_experts": slots}, ("cuda",)),
        Way("all experts on the GPU", {"experts": "gpu"}, ("cuda",)),
        Way("streamed dense weights", {"dense_gib": 0.0}, ("cuda",)),
        Way("fp8 keys and values", {"kv_dtype": "fp8"}, lossless=False),
        Way("2 experts deferred", {"defer": 2}, lossless=False),
    ]
    kind = device.partition(":")[0]
    return [way for way in every if kind in way.on and (documents > 1 or not way.at_once)]


def evaluate(
    path: Path,
    device: str = "cpu",
    tokens: int = 1500,
    length: int = 256,
    stdlib: Path | None = None,
    rules: Rules = None,
    told: Callable[[str], None] = lambda name: None,
    **settings: Any,
) -> Result:
    """Scores held-out files in every way that the device has.

    Args:
        tokens: of the text, at least; ``length`` of each file's beginning, half of it as a prompt.
        told: called with the name of each way before it is run.
        settings: of ``load_engine``, of all ways.

    Raises:
        PykernelsError: texts shorter than ``LEAST``, or what the plainest way is refused with.
    """
    from pykernels.target import detect

    if length < LEAST:
        raise PykernelsError(f"texts of {length} tokens", f"Give --length {LEAST} or more")
    text = heldout(load_tokenizer(path), tokens, length, stdlib)
    documents = text.tokens.tolist()
    D, prompt = len(documents), length // 2
    if device.startswith("cuda"):
        settings = {"experts": "cpu", "prefill": "cpu", **settings}
    plain = {
        "max_model_len": length,
        "max_num_seqs": D,
        "max_num_logits": length,
        "draft": "off",
        "overlap": False,
        "numa": "off",
        "rules": rules,
        **settings,
    }
    plainest = Way("plainest")
    told(plainest.name)
    with _loaded(path, device, plain, plainest) as llm:
        base = score(llm, documents, prompt)
        kernel, model = llm.kernel, llm.config.model_type
        program = llm.runner.model.lower()
        slots = max(1, min((node.attr("experts") for node in routers(program)), default=2) // 2)
    allowed = FLOAT32
    if device != "ref":
        told("plainest on ref")
        exact = {k: v for k, v in plain.items() if k not in ("experts", "prefill")}
        with _loaded(path, "ref", exact, plainest) as llm:
            allowed = OF_ROUNDING * _rms(score(llm, documents, prompt) - base)
    rows = []
    for way in ways(device, length, D, slots):
        told(way.name)
        rows.append(_row(way, path, device, plain, documents, prompt, base, allowed))
    return Result(
        model=model,
        device=device,
        cpu=detect().cpu,
        python=platform.python_version(),
        kernel=kernel,
        documents=D,
        length=length,
        prompt=prompt,
        heldout_sha256=text.sha256,
        perplexity=_perplexity(base),
        allowed=allowed,
        rows=tuple(rows),
    )


@contextmanager
def _loaded(path: Path, device: str, plain: dict[str, Any], way: Way) -> Iterator[LLM]:
    nodes = way.settings.get("numa")
    before = os.environ.get("PYKERNELS_FAKE_NUMA")
    if nodes and before is None:  # made-up nodes sum as real ones do
        os.environ["PYKERNELS_FAKE_NUMA"] = str(nodes)
    try:
        with load_engine(path, device=device, **{**plain, **way.settings}) as llm:
            yield llm
    finally:
        if nodes and before is None:
            del os.environ["PYKERNELS_FAKE_NUMA"]


def _row(
    way: Way,
    path: Path,
    device: str,
    plain: dict[str, Any],
    documents: list[list[int]],
    prompt: int,
    base: NDArray[np.float64],
    allowed: float,
) -> Row:
    start = 1
    try:
        with _loaded(path, device, plain, way) as llm:
            if way.again:
                start = max(1, prompt - TAIL)
                once = SamplingParams(max_tokens=1, temperature=0)
                llm.engine.generate([document[:prompt] for document in documents], once)
            scores = score(llm, documents, prompt, start, way.at_once)
            shown = way.shown(llm)
    except PykernelsError as error:
        return Row(way.name, way.lossless, refused=str(error))
    same = base[:, start - 1 :]
    difference = scores - same
    return Row(
        way.name,
        way.lossless,
        perplexity=_perplexity(scores),
        plain=_perplexity(same),
        rms=_rms(difference),
        largest=float(np.abs(difference).max()),
        tokens=scores.size,
        equal=bool((difference == 0).all()),
        within=_rms(difference) <= allowed,
        shown=shown,
    )


def _perplexity(logprobs: NDArray[np.float64]) -> float:
    return float(np.exp(-logprobs.mean()))


def _rms(difference: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(difference).mean()))
