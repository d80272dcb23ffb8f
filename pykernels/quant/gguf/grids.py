"""The grids of ggml's IQ types: which levels of 4 or 8 weights one index stands for.

Source: ``iq3s_grid`` and the others of ggml (``ggml-common.h``). Each is kept as its sorted points,
16 bits a point: the level of weight i at bit 3 i (grids of 4 weights) or 2 i (of 8).
"""

from __future__ import annotations

import base64
import functools

import numpy as np
import torch


class Grid:
    """Points of ``dims`` levels each.

    Attributes:
        levels: uint8 [points, dims].
        words: uint32 [points, dims / 4]: the same, a level a byte, the first in the lowest.

    Args:
        dims: weights of a point: 4 or 8.
        values: what each level stands for; how near points are goes by them.
        points: base64 of the points, see the module.
    """

    def __init__(self, dims: int, values: tuple[float, ...], points: str) -> None:
        self._bits = 3 if dims == 4 else 2
        self._values = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._numbers = np.frombuffer(base64.b64decode(points), "<u2")
        shifts = np.arange(dims, dtype=np.uint16) * self._bits
        levels = self._numbers[:, None] >> shifts & np.uint16((1 << self._bits) - 1)
        self.words = levels.astype(np.uint8).view("<u4")
        self.levels = torch.from_numpy(levels.astype(np.uint8))

    def index_of(self, levels: torch.Tensor) -> torch.Tensor:
        """uint8 [..., dims] -> int64 [...]: the point of these levels, or the one that is nearest
        to them."""
        places = torch.arange(levels.shape[-1], dtype=torch.int64, device="cpu") * self._bits
        return self._nearest[(levels.long() << places).sum(-1)]

    @functools.cached_property
    def _nearest(self) -> torch.Tensor:
        """int64 by the number of every combination of levels."""
        dims, count = self.levels.shape[1], len(self._values)
        places = torch.arange(dims, dtype=torch.int64, device="cpu") * self._bits
        every = torch.cartesian_prod(*[torch.arange(count, dtype=torch.int64, device="cpu")] * dims)
        # Integers: no two equal distances differ by rounding.
        points, wanted = self._values[self.levels.long()], self._values[every]
        distances = points.square().sum(1) - 2 * wanted @ points.T
        found = torch.zeros(1 << self._bits * dims, dtype=torch.int64, device="cpu")
        found[(every << places).sum(1)] = distances.argmin(1)
        return found


IQ3_S = Grid(
    4,
    tuple(range(1, 17, 2)),
    "AAABAAIABQAHAAgACQAKAAwADgAQABEAFQAbACAAIgAlACcAKQArADAAMgA5ADwAPwBAAEEAQgBEAEgASQBNAFAAUwBXA"
    "FkAXQBkAHEAdQB6AIAAgQCFAIcAiACLAI4AkQCVAJgAnACiAKUApwCpAKsAuAC7AMMAyQDNANAA0gDZANsA3gDkAOgA6g"
    "D3APkA/QAAAQsBDwERARQBGgEgASMBKQE4AUIBRAFQAVIBVgFbAWEBZQFnAXYBewGGAYkBiwGZAaoBuQHAAcIBxAHQAdI"
    "B1gHbAegB7AEAAgECAgIEAggCCQILAg0CDwIQAhICGQIcAh4CLAIuAjECOgJAAkECQwJGAkgCTAJRAlgCWwJhAmgCagJ4"
    "An4CgAKKAo0CjwKQApQCmgKgAqMCrQKwAroCwQLEAscCyALLAtEC1wLYAtwC4QLyAvgCAwMFAwoDDAMZAxsDIgMmAygDL"
    "ANBA0gDSwNRA1gDWgNpA5ADlAOXA6QDpgPBA8MDyAPKA9ED3QPhA/ID+AMABAEEAwQFBAcECAQKBAwEDgQRBBMEFwQYBB"
    "oEIQQjBCUEKAQqBDcEOAQ7BD0EQARCBEgESwRPBFIEVQRZBFwEYgRpBIEEhASHBJEEkwSYBJ8EoQSrBK8EuQS8BMAEwgT"
    "FBMkE0gTUBNkE2wTiBOgE9gQBBQcFEAUTBRoFHQUhBToFPQVEBUkFUgVfBWAFawV4BYAFggWHBZEFrQWxBcUFyQXWBdgF"
    "4wXoBQIGCQYLBg0GDwYSBhkGGwYdBiIGJAYnBikGMwY5BkEGQwZFBkwGUQZTBmAGcAZ6Bn4GgAaKBpAGmgacBqgGwQbIB"
    "swG0QbTBtcG2AbhBuMG5wbtBvsGAwcJBw4HEgcZByoHMAc0B0EHSAdKB1UHWgdkB24HeweOB6EHwQfDB9AH0gfdBwAIBA"
    "gKCBAIFAgXCBoIIQgoCDgIQghHCEkISwhSCFgIXQhjCGkIbQiBCIMIiAiNCJEImwigCK8Isgi4CMQIyQjLCNAI0gjZCN0"
    "IAAkCCRQJHwkgCTkJRQlHCVEJcgmLCZwJsAnICc0J2AnjCekJAgoICgwKEgogCiQKJwoqCjYKPApBCkMKRQpKClEKWgp6"
    "CoAKiQqTCpgKngqrCsIKxwrICtcK5ArpCvUK+woBCwQLEAsaCyYLSgtWC2kLawuiC8ILxAvSCwkMCwwNDBkMGwwwDEAMU"
    "AxXDHQMigycDKIMrQyyDLgMwAzMDNEM4AwVDSMNMg1ADUMNXA1wDYUNoA3JDcsNAA4EDgcOEA4SDh4OIA4sDjIOQg5JDl"
    "QOYw5lDoEOhA6IDo4OkQ6YDqkOwg7aDt0O6w4BDwUPCw8QDygPUg9iD4IPmQ/ADw==",
)

IQ3_XXS = Grid(
    4,
    (2, 6, 10, 14, 18, 22, 26, 31),
    "AAACAAQACQALAA8AEAASABkAIgA7AD0AQQBDAEgASgBRAFUAWABaAGEAbAB4AIAAggCEAIkAkACSAJkAmwCfAKkArwC9A"
    "MEAxwDIAMoA1QD4AAsBHwEkAS8BOwE9AUEBRwFaAWoBnQG0AcgBzAHOAeMB8QEBAgMCCAIKAhECEwIYAhoCHAInAigCQA"
    "JCAkkCUAJSAoECgwKIAooCkQKYAroCwALCAtAC2QLmAvYCAQMFAygDUANUA2YDeQOFA9ID4AMABAIECQQLBBAEEgQWBBk"
    "EIgRBBEMERQRIBEoEUQRYBHMEdwR4BIAEggSJBI8EkASSBJ8EoAStBMEEyATMBPgE/AQdBSsFQwVXBWEFfAXBBcMFzgXl"
    "BQEGCAYKBhEGEwYoBjUGOgZABkIGUAZZBmQGZgaBBoMGiAaVBqoGugbJBtsGGAcnBzoHQAdGB1IHbQeMB54HswfbB/AHB"
    "AgPCB0IHwgrCC8IfAiQCJ8IoAiwCLYIxwjlCAQJKQk0CVUJYwl4CcUJyAnKCdgJCgohCjgKQApGClYKbQqMCpoKugrCCu"
    "sKCAsTCxcLOgtCC1kLqAvUC+ILFAwkDCYMNAxRDHEMjwy0DNgM3gwkDUUNag2bDcMN0Q0DDgUOBw4IDhoOKg5WDmAOig6"
    "lDqoOwA7NDtsO8A4RDyEPQA9CD1QPmA8=",
)
