"""Which experts go to a GPU: a number of each layer, as many as fit, or the most used ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pykernels.errors import PykernelsError

from .profile import Profile, read

Wanted = int | str | Path | None
"""Experts of each layer, "auto", or a profile's file."""


@dataclass(frozen=True)
class Block:
    """A layer's experts: how many, bytes of one on the device, and the device."""

    E: int
    expert_bytes: int
    device: str


def parse(wanted: Wanted) -> int | str | Profile | None:
    """What was asked for; `PykernelsError` for a number below 0, or no profile."""
    if wanted is None:
        return None
    text = str(wanted)
    if text == "auto":
        return text
    if text.lstrip("-").isdecimal():
        if int(text) < 0:
            raise PykernelsError(f"{text} experts on the GPU", "Give 0 or more")
        return int(text)
    return read(Path(text))


def choose(
    wanted: int | str | Profile, blocks: Mapping[str, Block], free: Mapping[str, int]
) -> dict[str, list[int]]:
    """The experts of each block that its device keeps; the CPU keeps one of each block at least.

    Args:
        wanted: N: the first N of each layer; "auto": the same, as many as fit; a profile: the
            most used of all layers, as many as fit.
        free: bytes that experts may take on each device.

    Raises:
        PykernelsError: a profile of another model, or more than fit.
    """
    if isinstance(wanted, Profile):
        return _most_used(wanted, blocks, free)
    each = dict.fromkeys(free, 0)  # bytes of one expert of every layer of a device
    for block in blocks.values():
        each[block.device] += block.expert_bytes
    fits = {device: free[device] // max(1, need) for device, need in each.items() if need}
    if wanted == "auto":
        return {n: list(range(min(fits[b.device], b.E - 1))) for n, b in blocks.items()}
    N = int(wanted)
    least = min(block.E for block in blocks.values())
    if N >= least:
        raise PykernelsError(
            f"{N} of a layer's {least} experts on the GPU", f"Give {least - 1} at most"
        )
    for device, capacity in fits.items():
        if N > capacity:
            raise PykernelsError(
                f"{N} experts of each layer need {N * each[device] / 2**30:.1f} GiB on {device},"
                f" {max(0, free[device]) / 2**30:.1f} GiB are left for them",
                f"Give {max(0, capacity)} at most, or auto",
            )
    return {name: list(range(N)) for name in blocks}


def _most_used(
    profile: Profile, blocks: Mapping[str, Block], free: Mapping[str, int]
) -> dict[str, list[int]]:
    sizes = {name: len(row) for name, row in profile.counts.items()}
    if sizes != {name: block.E for name, block in blocks.items()}:
        raise PykernelsError(
            f"The profile is of {len(sizes)} layers of a {profile.model_type}, whose experts are"
            " not this model's",
            "Write one of this model with pykernels profile experts",
        )
    left = dict(free)
    ranked = sorted(
        ((count, name, e) for name, row in profile.counts.items() for e, count in enumerate(row)),
        key=lambda one: -one[0],
    )
    chosen: dict[str, list[int]] = {name: [] for name in blocks}
    for count, name, e in ranked:
        block = blocks[name]
        if not count or len(chosen[name]) + 1 >= block.E or left[block.device] < block.expert_bytes:
            continue
        chosen[name].append(e)
        left[block.device] -= block.expert_bytes
    return chosen
