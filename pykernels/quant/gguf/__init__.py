"""Formats of GGUF files, a family a file; ``base`` has what they share."""

from __future__ import annotations

from .base import GGUF, Blocks
from .blocks32 import Blocks32
from .iq1 import IQ1M, IQ1S
from .iq2 import IQ2S, IQ2XS, IQ2XXS
from .iq3 import IQ3S, IQ3XXS
from .iq4_nl import IQ4NL, IQ4XS
from .kquants import Q6K, AffineK
from .kquants_low import Q2K, Q3K
from .q8_0 import Q8_0
from .ternary import Q10, Q20, TQ10, TQ20, Ternary

__all__ = [
    "AffineK",
    "Blocks",
    "Blocks32",
    "GGUF",
    "IQ1M",
    "IQ1S",
    "IQ2S",
    "IQ2XS",
    "IQ2XXS",
    "IQ3S",
    "IQ3XXS",
    "IQ4NL",
    "IQ4XS",
    "Q10",
    "Q20",
    "Q2K",
    "Q3K",
    "Q6K",
    "Q8_0",
    "TQ10",
    "TQ20",
    "Ternary",
]
