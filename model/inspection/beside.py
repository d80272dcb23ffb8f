"""Which experts a GPU would have beside all of them on the CPU, and what that changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError
from runtime.devices.gpus import HEADROOM

from ..modules.moe import FusedMoE
from ..modules.placement import Placement
from ..pinning.choose import Block, choose
from ..pinning.profile import Profile
from .entries import Entry, packed_experts
from .formats import Formats

SUFFIX = ".gpu_experts"
"""Of the entry of a layer's experts on a GPU, behind the name of its block."""
CACHE_TOKENS = 2 * 8192
"""For which the KV cache has room at least: two sequences."""


@dataclass(frozen=True)
class Beside:
    """Experts that are on a GPU too.

    Attributes:
        experts: of all ``layers`` that have any; ``bytes``: on the GPU.
        share: of a token's choices that they take; ``profiled``: as a text had it, else as if
            tokens took all experts alike.
        cpu_token_bytes: of routed experts that the CPU reads a token; ``without``: if it has all.
    """

    experts: int
    layers: int
    bytes: int
    share: float
    profiled: bool
    cpu_token_bytes: int
    without: int


def room_beside(
    found: Sequence[Entry], cache_token_bytes: int, gpus: Sequence[str], gpu_gib: float | None
) -> int | None:
    """About how many bytes of the GPUs are left for experts beside all else; None if nobody knows.

    Args:
        found: the model's.
        gpu_gib: GiB of each one's memory; None: what is free of this machine's.
    """
    if gpu_gib is not None:
        free = len(gpus) * int(gpu_gib * 2**30)
    elif torch.cuda.device_count() >= len(gpus):
        free = sum(torch.cuda.mem_get_info(device)[0] for device in gpus)
    else:
        return None
    dense = sum(entry.bytes for entry in found if entry.device in gpus)
    return max(0, free - len(gpus) * HEADROOM - dense - CACHE_TOKENS * cache_token_bytes)


def with_experts_beside(
    found: Sequence[Entry],
    asked: int | str | Profile,
    model: PreTrainedModel,
    placement: Placement,
    formats: Formats,
    room: int | None,
) -> tuple[list[Entry], Beside]:
    """The entries with an entry more for each layer that has experts on its GPU, too.

    Args:
        asked: see ``choose``.
        model: an injected meta model, of which the entries are.
        room: bytes of the GPUs that experts may take; None if that is not known.

    Raises:
        PykernelsError: a profile or "auto" without ``room``; no experts of ours; as ``choose``.
    """
    if room is None and not isinstance(asked, int):
        raise PykernelsError(
            "how many experts fit depends on the GPU's memory, and there is no GPU here",
            "Add --gpu-memory 80, in GiB, or give a number of experts",
        )
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FusedMoE)}
    if not modules:
        raise PykernelsError("this model has no routed experts of ours", "Leave out --gpu-experts")
    there = {
        name: packed_experts(name, m, formats, placement.of(name)) for name, m in modules.items()
    }
    blocks = {
        name: Block(m.shape.E, there[name].bytes // m.shape.E, there[name].device)
        for name, m in modules.items()
    }
    free = dict.fromkeys((b.device for b in blocks.values()), 1 << 62 if room is None else room)
    chosen = {name: ids for name, ids in choose(asked, blocks, free).items() if ids}
    made: list[Entry] = []
    for entry in found:
        name = entry.name.removesuffix(".experts")
        if not entry.routed or name not in chosen:
            made.append(entry)
            continue
        share = _share(asked, name, chosen[name], blocks[name].E)
        made.append(replace(entry, token_bytes=round(entry.token_bytes * (1 - share))))
        made.append(_beside(name, there[name], blocks[name], len(chosen[name]), share))
    before, after = (
        sum(entry.token_bytes for entry in some if entry.routed) for some in (found, made)
    )
    beside = Beside(
        sum(map(len, chosen.values())),
        len(chosen),
        sum(entry.bytes for entry in made if entry.name.endswith(SUFFIX)),
        1 - after / max(1, before),
        isinstance(asked, Profile),
        after,
        before,
    )
    return made, beside


def _share(asked: int | str | Profile, name: str, experts: Sequence[int], E: int) -> float:
    """Share of a token's choices in a layer that these experts take."""
    if not isinstance(asked, Profile):
        return len(experts) / E
    counts = asked.counts[name]
    return sum(counts[e] for e in experts) / max(1, sum(counts))


def _beside(name: str, whole: Entry, block: Block, count: int, share: float) -> Entry:
    """The entry of a layer's experts on a GPU; it has no numbers of its own.

    Args:
        whole: of all experts, were they there.
    """
    return replace(
        whole,
        name=f"{name}{SUFFIX}",
        cls=f"{count} of them too",
        parameters=0,
        bytes=block.expert_bytes * count,
        token_bytes=round(whole.token_bytes * share),
        routed=False,
    )
