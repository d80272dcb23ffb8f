"""Formats of GGUF files, a family a file; ``base`` has what they share."""

from __future__ import annotations

from .base import GGUF, Blocks
from .blocks32 import Blocks32
from .iq2 import IQ2S, IQ2XS, IQ2XXS
from .iq3 import IQ3S, IQ3XXS
from .iq4_nl import IQ4NL, IQ4XS
from .kquants import Q6K, AffineK
from .kquants_low import Q2K, Q3K
from .q8_0 import Q8_0

__all__ = [
    "GGUF",
    "IQ2S",
    "IQ2XS",
    "IQ2XXS",
    "IQ3S",
    "IQ3XXS",
    "IQ4NL",
    "IQ4XS",
    "Q2K",
    "Q3K",
    "Q6K",
    "Q8_0",
    "AffineK",
    "Blocks",
    "Blocks32",
]
