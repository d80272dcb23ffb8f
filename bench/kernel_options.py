"""What `pykernels bench moe`, `attention`, `linear` and `router` time: the arguments of a case."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from runtime.planning.option import option

Flags = dict[str, int | str]
_count = partial(option, metavar="N", kind=int, least=1)


@dataclass(frozen=True)
class MoELayer:
    """The routed experts of one layer, and one call of them."""

    format: str = option("fp8", "Weight format:", "NAME")
    tokens: int = _count(1, "Tokens in one call.")
    hidden: int | None = _count(None, "Width of the model.", shown="7168; with --against 2048")
    inter: int | None = _count(None, "Width of an expert.", shown="2048; with --against 1024")
    experts: int = _count(32, "Experts in the layer.")
    topk: int = _count(8, "Experts a token uses.")
    routing: str = option(
        "balanced",
        "Tokens over experts, the same FLOPs: as many for each; rank r drawn with weight 1/(r+1);"
        " all the same.",
        "balanced|zipf|one",
    )
    activations: str | None = option(
        None,
        "Inputs of the products: as they are (default), or quantized for each token: on the CPU"
        " int8 (integer formats only; about 1 % off), on a GPU fp8 (fp8 weights only, and the"
        " default there with many tokens an expert).",
        "bf16|int8|fp8",
    )

    def flags(self) -> Flags:
        """The arguments of a GPU's case."""
        return {**asdict(self), "activations": self.activations or "auto"}


@dataclass(frozen=True)
class Attention:
    """Attention over a paged cache."""

    kind: str = option(
        "mla_decode",
        "Latent or grouped-query attention.",
        "mla_decode|mla_prefill|gqa_decode|gqa_prefill",
    )
    batch: int = _count(1, "Sequences.")
    context: int = _count(8192, "Tokens in the cache of each.")
    heads: int = _count(128, "Query heads.")
    kv_heads: int = _count(8, "Key and value heads (gqa).")
    head_dim: int = _count(128, "Width of a head (gqa).")
    format: str = option("bf16", "Of the cache.", "bf16|fp8")
    window: int = option(0, "Sliding window (gqa); 0: none.", "N", kind=int, least=0)
    new: int = option(
        0, "New tokens; 0: one of a decode, all of a prefill.", "N", kind=int, least=0
    )
    keys: str = option(
        "rows", "Where a gqa_prefill's keys lie; those of fp8 are in pages.", "rows|pages"
    )


@dataclass(frozen=True)
class Linear:
    """One linear layer."""

    format: str = option("int4", "Weight format, as `bench moe` names them.", "NAME")
    tokens: int = _count(1, "Rows of the input.")
    activations: str = option(
        "auto",
        "Inputs of the product; auto: fp8 for many rows of fp8 weights on a GPU; int8: the CPU's.",
        "auto|bf16|fp8|int8",
    )
    inputs: int = _count(7168, "Width of the input.")
    outputs: int = _count(7168, "Width of the output.")


@dataclass(frozen=True)
class Router:
    """A router, and on a GPU the tokens' sort by expert."""

    kind: str = option("v3", "DeepSeek's grouped routers, or one group.", "v3|v2|softmax|sigmoid")
    tokens: int = _count(1, "Tokens in one call.")
    experts: int = _count(256, "Experts in the layer.")
    topk: int = _count(8, "Experts a token uses.")
    hidden: int = _count(7168, "Width of the model.")
