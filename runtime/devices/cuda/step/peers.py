"""Which GPUs of an engine reach each other's memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from pykernels.gpu.common.peer_access import enable, has_atomics

from ...gpus import Gpus


@dataclass(frozen=True)
class Peers:
    """Peer access between GPUs, by their names in programs.

    Attributes:
        direct: pairs of a GPU and one whose memory it reaches.
        described: a line for people; "" where there is one GPU.
        atomics: whether all of them reach all others, with atomics.
    """

    direct: frozenset[tuple[str, str]] = frozenset()
    described: str = ""
    atomics: bool = False

    @classmethod
    def of(cls, gpus: Gpus) -> Peers:
        """Lets each of these GPUs reach the memory of the others, where it can."""
        reasons = {
            (name, peer): enable(gpus[name], gpus[peer]) for name, peer in permutations(gpus, 2)
        }
        direct = frozenset(pair for pair, reason in reasons.items() if reason is None)
        if not reasons:
            return cls()
        if len(direct) == len(reasons):
            atomics = all(has_atomics(gpus[name], gpus[peer]) for name, peer in direct)
            return cls(direct, "GPUs write to each other's memory (peer access)", atomics)
        missing = dict.fromkeys(reason for reason in reasons.values() if reason is not None)
        some = "some GPUs" if direct else "GPUs"
        return cls(direct, f"{some} meet in main memory, not by peer access: {'; '.join(missing)}")
