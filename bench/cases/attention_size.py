"""What one case of attention is: its kind, its batch, its heads and its cache."""

from __future__ import annotations

from dataclasses import dataclass

from pykernels.errors import PykernelsError

KINDS = ("mla_decode", "gqa_decode", "mla_prefill", "gqa_prefill")


@dataclass(frozen=True)
class Size:
    """One case. ``kv_heads``, ``head_dim``, ``window``: of GQA; ``new``: the newest tokens of the
    context, whose queries these are (0: one of a decode, all of a prefill); ``keys``: whether a GQA
    prefill reads them from "rows" beside the queries or from "pages", as a decode does."""

    kind: str
    batch: int = 1
    context: int = 8192
    heads: int = 128
    kv_heads: int = 8
    head_dim: int = 128
    format: str = "bf16"
    window: int = 0
    new: int = 0
    keys: str = "rows"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PykernelsError(f"no attention {self.kind!r}", f"Use one of {', '.join(KINDS)}")
        if self.format not in ("bf16", "fp8"):
            raise PykernelsError(f"no {self.format} cache", "Use bf16 or fp8")
        if self.keys not in ("rows", "pages"):
            raise PykernelsError(f"keys do not lie in {self.keys!r}", "Use rows or pages")
        if not self.decode and self.format != "bf16" and self.keys == "rows":
            raise PykernelsError(
                "keys in rows are bf16", "Leave the format out, or keys=pages with gqa_prefill"
            )
        if self.keys == "pages" and self.kind != "gqa_prefill":
            raise PykernelsError("only gqa_prefill reads keys from either", "Leave keys out")
        for name in ("kv_heads", "head_dim", "window") if self.mla else ():
            if getattr(self, name) != getattr(Size, name):
                raise PykernelsError(f"MLA has no {name}", "Leave it out, or use a GQA kind")
        if self.new > self.context:
            raise PykernelsError(
                f"{self.new} new tokens in a context of {self.context}", "Give a larger context"
            )

    @property
    def mla(self) -> bool:
        return self.kind.startswith("mla")

    @property
    def decode(self) -> bool:
        return self.kind.endswith("decode")

    @property
    def queries(self) -> int:
        """Tokens of a sequence whose attention is computed."""
        return self.new or (1 if self.decode else self.context)

    @property
    def keys_read(self) -> int:
        """Keys of a sequence that the mask of any query lets through."""
        width = self.window + self.queries - 1 if self.window else self.context
        return min(self.context, width)

    @property
    def pairs(self) -> int:
        """Pairs of a sequence's queries and the keys that its mask lets through."""
        first, last = self.context - self.queries + 1, self.context  # keys of these queries
        if self.window:
            return sum(min(n, self.window) for n in range(first, last + 1))
        return self.queries * (first + last) // 2

    @property
    def params(self) -> dict[str, int | str]:
        shown: dict[str, int | str] = {
            "batch": self.batch,
            "context": self.context,
            "heads": self.heads,
        }
        if not self.mla:
            shown |= {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
            shown |= {"window": self.window} if self.window else {}
        if self.queries > 1 or not self.decode:
            shown |= {"new": self.queries}
        if self.keys == "pages":
            shown |= {"keys": self.keys}
        return {**shown, "format": self.format}
