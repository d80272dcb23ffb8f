"""What llama.cpp's programs are told: what of a model is on the GPU, and how a prompt is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from .llama_tools import ON_CPU, ON_GPU, Tools

UBATCHES = (512, 2048, 4096)
"""``-ub``: its default, and what users raise it to where experts cross the link for a prompt."""
AUTO = "auto"
"""As `llama-bench` does unless told otherwise."""


@dataclass(frozen=True)
class Offload:
    """What of a model is on the GPU.

    Attributes:
        name: of this player.
        options: of the programs.
        tools: the build that has them.
        fits: whether ``-ncmoe`` is the lowest that fits in the GPU's memory (``llama_fit``).
        flash: what is tried of ``-fa`` for prompts; "auto" is with flash attention where the
            backend has it, as both of its backends here do.
        loads: what is tried of ``-lm`` for prompts; "auto" maps the file, "none" reads it, experts
            on the CPU into pinned memory, which llama.cpp itself advises.
    """

    name: str
    options: tuple[str, ...] = ()
    tools: Tools = ON_CPU
    fits: bool = False
    flash: tuple[str, ...] = (AUTO,)
    loads: tuple[str, ...] = (AUTO,)


CPU_ONLY = Offload("llama.cpp", flash=(AUTO, "off"))
ON_THE_GPU = (
    # As ours: all experts.
    Offload("llama.cpp -ncmoe 99", ("-ngl", "99", "-ncmoe", "99"), ON_GPU, loads=(AUTO, "none")),
    Offload("llama.cpp -ngl 99", ("-ngl", "99"), ON_GPU, fits=True),
)


@dataclass(frozen=True)
class Batching:
    """How a prompt is taken: so many tokens a step, and a call, with flash attention or without, of
    weights that are loaded so."""

    ub: int = UBATCHES[0]
    b: int = 2048
    fa: str = AUTO
    lm: str = AUTO

    @property
    def options(self) -> tuple[str, ...]:
        """Returns the options of `llama-bench`."""
        words = ("-ub", str(self.ub), "-b", str(self.b), "-fa", self.fa)
        return words if self.lm == AUTO else (*words, "-lm", self.lm)

    @property
    def is_default(self) -> bool:
        """Whether `llama-bench` does so unless told otherwise; ``-b`` changes no step."""
        return self == Batching(b=self.b)


def batchings(tokens: int, offload: Offload) -> list[Batching]:
    """Batchings that may win for a prompt, and the default: no ``-ub`` beyond the first that takes
    it in one step. In the order in which `llama-bench` times them."""
    ubs = _sizes(tokens)
    tried = product(offload.loads, ubs, offload.flash)
    return [Batching(ub, max(Batching.b, ubs[0]), fa, lm) for lm, ub, fa in tried]


def grid(wanted: Sequence[Batching]) -> list[Batching]:
    """Those that one process times, in its order, if it is to time these: it takes a list for each
    option, and times all pairs."""
    loads, ubs, flash = (
        list(dict.fromkeys(getattr(one, name) for one in wanted)) for name in ("lm", "ub", "fa")
    )
    b = max(one.b for one in wanted)
    return [Batching(ub, b, fa, lm) for lm, ub, fa in product(loads, ubs, flash)]


def _sizes(tokens: int) -> list[int]:
    """The largest first: if time runs out, the fastest ones are there."""
    more = [ub for smaller, ub in pairwise(UBATCHES) if smaller < tokens]
    return [*reversed(more), UBATCHES[0]]


def thread_counts(threads: int) -> list[int]:
    """Threads that may win for a decode: all, or fewer, which wait less for each other."""
    few = [3 * threads // 4, threads // 2] if threads >= 8 else []
    return [threads, *few]
