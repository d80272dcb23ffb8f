"""Weight formats on the tile layout: a family a file."""

from __future__ import annotations

from ..errors import PykernelsError
from .bf16 import BF16
from .experts import Allocator, Biases, PackedExperts, Packer
from .f16 import F16
from .format import Format, Weight
from .fp8 import FP8, FP8Channel
from .gguf import (
    IQ1M,
    IQ1S,
    IQ2S,
    IQ2XS,
    IQ2XXS,
    IQ3S,
    IQ3XXS,
    IQ4NL,
    IQ4XS,
    Q2K,
    Q3K,
    Q6K,
    Q8_0,
    Q10,
    Q20,
    TQ10,
    TQ20,
    AffineK,
    Blocks32,
)
from .integer import Integer, IntegerChannel
from .matrix import PackedHeads, PackedMatrix
from .mxfp4 import MXFP4
from .nvfp4 import NVFP4
from .zero_point import ZeroPoint

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        BF16(),
        F16(),
        FP8(),
        FP8Channel(),
        Integer("int8", bits=8, group=128),
        IntegerChannel("int8-channel", bits=8),
        Integer("int4", bits=4, group=32),
        Integer("int4-g128", bits=4, group=128),
        IntegerChannel("int4-channel", bits=4),
        ZeroPoint("int4-zp", group=32),
        ZeroPoint("int4-zp-g128", group=128),
        MXFP4(),
        NVFP4(),
        AffineK(bits=4),
        AffineK(bits=5),
        Q6K(),
        Q3K(),
        Q2K(),
        Q8_0(),
        Blocks32(bits=4, minimum=False),
        Blocks32(bits=4, minimum=True),
        Blocks32(bits=5, minimum=False),
        Blocks32(bits=5, minimum=True),
        IQ4NL(),
        IQ4XS(),
        IQ3S(),
        IQ3XXS(),
        IQ2S(),
        IQ2XS(),
        IQ2XXS(),
        IQ1S(),
        IQ1M(),
        TQ10(),
        TQ20(),
        Q20(),
        Q10(),
    )
}


def get_format(name: str) -> Format:
    """The format called ``name``; raises PykernelsError with the known names."""
    if name not in FORMATS:
        raise PykernelsError(
            f"there is no weight format {name!r}", f"Use one of {', '.join(FORMATS)}"
        )
    return FORMATS[name]


__all__ = [
    "FORMATS",
    "Allocator",
    "Biases",
    "Format",
    "PackedExperts",
    "PackedHeads",
    "PackedMatrix",
    "Packer",
    "Weight",
    "get_format",
]
