"""The peers: where each lives, how it stores weights, which of our formats it is compared with.

Only the standard library is imported here: the peers' own Pythons read this file too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CHECKOUT = (ROOT / "pyproject.toml").is_file()
_HOME = ROOT if _CHECKOUT else Path.cwd()  # an installed package is no place to write
VENVS = _HOME / ".venv-peers"
RESULTS = _HOME / "bench/results"


@dataclass(frozen=True)
class Peer:
    """One way of one engine to compute the experts.

    Attributes:
        engine: one of ``engines.ENGINES``; those of ``OWN_VENV`` have an environment of their own.
        mode: the engine's name for how weights are stored.
        bytes_per_weight: read from memory, block scales included.
        formats: our formats that are stored alike; empty: it is compared with every format.
        features: CPU features that it needs, in LLVM's names.
        unless: where the CPU has these, the engine has a faster mode, and this one is left out.
        max_tokens: more tokens a call are not asked of it; 0: no bound.
        loading: bytes that copies of a weight take until it is loaded, beside those that stay
            and those of the one expert that the others are copies of.
    """

    engine: str
    mode: str
    bytes_per_weight: float
    formats: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    max_tokens: int = 0
    loading: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"

    def matches(self, fmt: str, tokens: int) -> bool:
        """Whether a call of ``tokens`` in our format ``fmt`` is compared with this peer."""
        fits = not self.max_tokens or tokens <= self.max_tokens
        return fits and (not self.formats or fmt in self.formats)

    def experts(self, E: int, topk: int) -> int:
        """Experts held of a layer of ``E``: no more than two longest calls can take: they read
        as many experts, and the next call others.
        """
        return min(E, 2 * topk * self.max_tokens) if self.max_tokens else E


OWN_VENV = ("kt-kernel", "llama.cpp")
TUNED = ("kt-kernel", "llama.cpp", "torch")
"""Engines that may be faster on fewer threads than there are cores: several counts are tried."""

_BF16, _VNNI, _AVX2, _FMA = ("avx512bf16",), ("avx512vnni",), ("avx2",), ("avx2", "fma")
_INT4 = ("int4", "int4-g128", "int4-zp", "int4-zp-g128", "mxfp4")
_SCALED_FP8 = 1 + 4 / (128 * 128)
_SCALED_INT4 = 0.5 + 4 / 32  # its bf16 scales become float32


def _llama_cpp(mode: str, bytes_per_weight: float, *formats: str) -> Peer:
    """One matrix of three is copied at a time, for all experts."""
    return Peer("llama.cpp", mode, bytes_per_weight, formats, _AVX2, loading=bytes_per_weight / 3)


# kt-kernel 0.7.2's bytes are measured at 7168 x 2048, on a CPU without AMX. VmHWM - VmRSS after it
# loaded 8 and 16 experts, bytes a weight: fp8 1.12 and 1.06, bf16 0.50 and 0.25, rawint4 0.13 and
# 0.07, amx 4.00 and 4.00; more layers are as one. So fp8 copies all experts, amx takes a bf16
# source of each and copies those, bf16 and rawint4 copy none: the rest is of the one source.
PEERS = (
    Peer("kt-kernel", "fp8", _SCALED_FP8, ("fp8", "fp8-channel"), _BF16, loading=1.0),
    Peer("kt-kernel", "bf16", 2.0, ("bf16",), _BF16),
    Peer("kt-kernel", "rawint4", _SCALED_INT4, _INT4, _BF16),
    Peer("kt-kernel", "avx2fp8", _SCALED_FP8, ("fp8", "fp8-channel"), _FMA, _BF16, loading=1.0),
    Peer("kt-kernel", "avx2bf16", 2.0, ("bf16",), _FMA, _BF16),
    Peer("kt-kernel", "avx2rawint4", _SCALED_INT4, _INT4, _FMA, _BF16),
    Peer("kt-kernel", "amxint4", 0.5, (*_INT4, "int4-channel"), _VNNI, loading=4.0),
    Peer("kt-kernel", "amxint8", 1.0, ("int8", "int8-channel"), _VNNI, loading=4.0),
    _llama_cpp("bf16", 2.0, "bf16"),
    _llama_cpp("f16", 2.0, "f16"),
    _llama_cpp("q8_0", 34 / 32, "q8_0", "int8"),
    _llama_cpp("q4_0", 18 / 32, "q4_0"),
    _llama_cpp("q4_1", 20 / 32, "q4_1"),
    _llama_cpp("q5_0", 22 / 32, "q5_0"),
    _llama_cpp("q5_1", 24 / 32, "q5_1"),
    _llama_cpp("iq4_nl", 18 / 32, "iq4_nl"),
    _llama_cpp("iq4_xs", 136 / 256, "iq4_xs"),
    _llama_cpp("iq2_xxs", 66 / 256, "iq2_xxs"),
    _llama_cpp("iq2_xs", 74 / 256, "iq2_xs"),
    _llama_cpp("iq2_s", 82 / 256, "iq2_s"),
    _llama_cpp("iq3_xxs", 98 / 256, "iq3_xxs"),
    _llama_cpp("iq3_s", 110 / 256, "iq3_s"),
    _llama_cpp("iq1_s", 50 / 256, "iq1_s"),
    _llama_cpp("iq1_m", 56 / 256, "iq1_m"),
    _llama_cpp("tq1_0", 54 / 256, "tq1_0"),
    _llama_cpp("tq2_0", 66 / 256, "tq2_0"),
    _llama_cpp("nvfp4", 36 / 64, "nvfp4"),
    _llama_cpp("q1_0", 18 / 128, "q1_0"),
    _llama_cpp("q2_0", 18 / 64, "q2_0"),
    _llama_cpp("q2_k", 84 / 256, "q2_k"),
    _llama_cpp("q3_k", 110 / 256, "q3_k"),
    _llama_cpp("q4_k", 144 / 256, "q4_k"),
    _llama_cpp("q5_k", 176 / 256, "q5_k"),
    _llama_cpp("q6_k", 210 / 256, "q6_k"),
    _llama_cpp("mxfp4", 17 / 32, "mxfp4"),
    Peer("torch", "bf16", 2.0),
    Peer("torch", "fp32", 4.0, max_tokens=8),
    Peer("numpy", "fp32", 4.0, max_tokens=1),
)
"""kt-kernel's amx modes run on VNNI where there is no AMX; it has no K-quants of its own, llama.cpp
no FP8. NumPy is one GEMV after another, so it is asked for one token only; torch in float32 takes
seconds for many."""

ENGINES = tuple(dict.fromkeys(peer.engine for peer in PEERS))
