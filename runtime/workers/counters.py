"""What the experts of a layer have done: counted by compiled code, where each call ends.

Right after a call the driver's Python is out of the caches (``pykernels.cpu.moe.call``), and the
caller waits for all that it does there.
"""

from __future__ import annotations

import numpy as np

from pykernels.cpu.intrin.descriptor import descriptor
from pykernels.cpu.jit import inlined

_COUNTERS, _counters_at = descriptor("counters", ("calls", "tokens", "bytes", "nanoseconds"))


@inlined
def count(address: int, tokens: int, nbytes: int, nanoseconds: int) -> None:
    """Counts one call in the counters at ``address``."""
    counters = _counters_at(address)
    counters.calls += 1
    counters.tokens += tokens
    counters.bytes += nbytes
    counters.nanoseconds += nanoseconds


class Counters:
    """What the experts have done since the last ``reset``.

    Attributes:
        address: of the words, for ``count``.
    """

    def __init__(self) -> None:
        self._words = np.zeros(1, _COUNTERS)
        self.address = int(self._words.ctypes.data)

    @property
    def calls(self) -> int:
        """Fused MoE calls."""
        return int(self._words["calls"][0])

    @property
    def tokens(self) -> int:
        """Tokens in them."""
        return int(self._words["tokens"][0])

    @property
    def bytes(self) -> int:
        """Weight bytes of the distinct experts that each call touched."""
        return int(self._words["bytes"][0])

    @property
    def seconds(self) -> float:
        """From the start of each call to its last task, summed."""
        return int(self._words["nanoseconds"][0]) / 1e9

    def add(self, tokens: int, nbytes: int, seconds: float) -> None:
        """Counts a call that several pools have run."""
        words = self._words[0]
        for name, more in (
            ("calls", 1),
            ("tokens", tokens),
            ("bytes", nbytes),
            ("nanoseconds", round(seconds * 1e9)),
        ):
            words[name] += more

    def reset(self) -> None:
        """Sets all of them to 0."""
        self._words.fill(0)
