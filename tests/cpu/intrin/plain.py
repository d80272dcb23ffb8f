"""Plain definitions that the tests of several kinds of vectors share."""

from __future__ import annotations

from typing import Any

import numpy as np


def e4m3(codes: Any) -> Any:
    """E4M3 without a sign, and with as many exponents as a byte has room for."""
    power, m = (codes >> 3).astype(np.int32), (codes & 7).astype(np.float32)
    return np.where(power == 0, m * 2.0**-9, (8 + m) * 2.0 ** (power - 10)).astype(np.float32)
