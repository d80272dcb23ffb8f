"""Calls of a kernel of the CPU on random inputs, out of cache: what a player times.

Of today's tree; but ``pykernels`` and ``runtime`` may be those of an older one, so it uses only
what both have. The experts run on a pool of threads, the other operations on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

Case = dict[str, Any]
"""``op``, and of that operation the arguments of its function here."""


class Calls(Protocol):
    """A kernel that is called again and again."""

    @property
    def flops(self) -> int:
        """Floating-point operations of a call."""
        ...

    def call(self) -> tuple[float, int]:
        """One call on the next inputs: seconds, and the bytes that it must read and write."""
        ...


@dataclass
class Prepared:
    """A kernel with its inputs.

    Attributes:
        kernel: its name.
        inputs: that calls take in turn.
        run: the kernel on some of them; ``truth``: the reference, in float64.
        nbytes: that a call must read and write.
    """

    kernel: str
    inputs: list[tuple[Any, ...]]
    run: Callable[..., Any]
    truth: Callable[..., Any]
    nbytes: int
    flops: int
    _next: int = field(default=0, init=False)

    def call(self) -> tuple[float, int]:
        """See ``Calls``."""
        given = self.inputs[self._next % len(self.inputs)]
        self._next += 1
        start = time.perf_counter()
        self.run(*given)
        return time.perf_counter() - start, self.nbytes


@contextmanager
def playing(case: Case) -> Iterator[tuple[Calls, str, int]]:
    """The calls of a case, the kernel's name and its threads.

    Raises:
        PykernelsError: it cannot run here.
    """
    given = {name: value for name, value in case.items() if name not in ("op", "check")}
    if case["op"] != "moe":
        prepared = OPS[case["op"]](**given)
        yield prepared, prepared.kernel, 1
        return
    from pykernels.shapes import MoEShape
    from runtime.profiling.measure import MoECase
    from runtime.workers.pool import make_pool

    with make_pool(given["threads"], numa=given["numa"]) as pool:
        calls = MoECase(
            given["fmt"],
            given["tokens"],
            MoEShape(**given["shape"]),
            pool,
            given["kernel"],
            given["routing"],
            given["activations"],
        )
        yield calls, calls.layers[0].backend.name, pool.threads


def linear(
    format: str,
    tokens: int,
    inputs: int,
    outputs: int,
    activations: str = "bf16",
    kernel: str = "auto",
    cached: bool = False,
) -> Prepared:
    """A quantized linear layer.

    Args:
        cached: one set of inputs, for a check.
    """
    import torch

    from pykernels import cpu, ref
    from pykernels.quant import PackedMatrix, get_format
    from pykernels.registry import resolve
    from pykernels.target import detect

    how = get_format(format)
    name = resolve(kernel, format, detect(), activations).name
    weight = how.quantize(_randn(outputs, inputs) / inputs**0.5)
    first = PackedMatrix.of(how, [weight])
    nbytes = first.blocks.nbytes + first.scales.nbytes + tokens * (2 * inputs + 4 * outputs)
    sets = [first, *(PackedMatrix.of(how, [weight]) for _ in range(_more(nbytes, cached)))]
    x = _randn(tokens, inputs).to(torch.bfloat16)

    def run(packed: Any) -> Any:
        return cpu.linear(x, packed, kernel=name, activations=activations)

    def truth(packed: Any) -> Any:
        return ref.linear(x, weight, fmt=how, dtype=torch.float64)

    flops = 2 * tokens * inputs * outputs
    return Prepared(name, [(packed,) for packed in sets], run, truth, nbytes, flops)


def attention(
    kind: str,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    format: str,
    window: int = 0,
    new: int = 0,
    cached: bool = False,
) -> Prepared:
    """Decode over a paged cache, of which ``new`` tokens a sequence (0: one) are this call's."""
    import torch

    from pykernels import cpu, ref
    from pykernels.errors import PykernelsError
    from pykernels.ref.kv_write import quantize_rows

    if kind not in ("mla_decode", "gqa_decode"):
        raise PykernelsError(
            f"the CPU's attention is not timed as {kind!r}",
            "Use mla_decode or gqa_decode; --new N gives either the newest N tokens of a prompt",
        )
    if format not in ("bf16", "fp8"):
        raise PykernelsError(f"no {format} cache", "Use bf16 or fp8")
    if window and kind == "mla_decode":
        raise PykernelsError("latent attention has no window", "Use gqa_decode")
    latent, S, pages = kind == "mla_decode", new or 1, -(-context // _PAGE)
    if S > context:
        raise PykernelsError(f"{S} new tokens in a context of {context}", "Give fewer")
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    width = (_LATENT, _ROPE) if latent else (head_dim, head_dim)
    held = 1 if latent else kv_heads
    given: dict[str, Any] = {"scale": sum(width) ** -0.5 if latent else head_dim**-0.5}
    if window:
        given["window"] = window
    queries = [_randn(batch, S, heads, D) for D in (width if latent else width[:1])]
    seen = min(context, window or context)
    value = 1 if format == "fp8" else 2
    of_token = (_LATENT * value + _ROPE * 2) if latent else 2 * head_dim * value
    nbytes = batch * seen * held * of_token

    def cache() -> tuple[Any, ...]:
        shape = (batch * pages, _PAGE) if latent else (batch * pages, _PAGE, kv_heads)
        if latent:
            both = _randn(*shape, sum(width)).to(torch.bfloat16)
            k, v = both[..., :_LATENT], both[..., _LATENT:]
        else:
            k, v = (_randn(*shape, head_dim).to(torch.bfloat16) for _ in range(2))
        if format == "bf16":
            return k, v, {}
        if latent:
            codes, scale = quantize_rows(k)
            return codes, v.contiguous(), {"latent_scale": scale}
        (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
        return k, v, {"k_scale": k_scale, "v_scale": v_scale}

    op, reference = getattr(cpu, kind), getattr(ref, kind)

    def run(k: Any, v: Any, scales: dict[str, Any]) -> Any:
        return op(*queries, k, v, table, lengths, **given, **scales)

    def truth(k: Any, v: Any, scales: dict[str, Any]) -> Any:
        return reference(*queries, k, v, table, lengths, **given, **scales, dtype=torch.float64)

    sets = [cache() for _ in range(1 + _more(nbytes, cached))]
    products = (2 * _LATENT + _ROPE) if latent else 2 * head_dim
    return Prepared(kind, sets, run, truth, nbytes, 2 * batch * S * heads * seen * products)


def router(kind: str, tokens: int, experts: int, topk: int, cached: bool = False) -> Prepared:
    """A router's choice of experts, from logits."""
    import torch

    from bench.against.routers import router_of
    from pykernels import cpu, ref

    spec = router_of(kind, topk, experts)
    bias = _randn(experts) / 4 if spec.scoring == "sigmoid" else None
    nbytes = tokens * (4 * experts + 12 * topk)
    logits = _randn(1 + _more(nbytes, cached), tokens, experts)

    def spread(routing: Any) -> Any:
        """Weights [T, E], so that a wrong expert is an error as a wrong weight is."""
        empty = torch.zeros(tokens, experts, dtype=torch.float64)
        return empty.scatter_(1, routing.ids, routing.weights.double())

    def run(some: Any) -> Any:
        return cpu.router(some, spec, bias)

    def truth(some: Any) -> Any:
        return ref.router(some, spec, bias, dtype=torch.float64)

    prepared = Prepared(kind, [(one,) for one in logits], run, truth, nbytes, 0)
    if cached:
        prepared.run = lambda some: spread(run(some))
        prepared.truth = lambda some: spread(truth(some))
    return prepared


OPS: dict[str, Callable[..., Prepared]] = {
    "linear": linear,
    "attention": attention,
    "router": router,
}

_PAGE, _LATENT, _ROPE = 64, 512, 64
"""Tokens of a page; DeepSeek's latent and rotated widths."""


def _randn(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _more(nbytes: int, cached: bool) -> int:
    """Sets of inputs beside the first: together more than twice what the last cache holds."""
    from pykernels.target import detect

    return 0 if cached else min(1023, 2 * detect().l3 // max(1, nbytes) + 1)
