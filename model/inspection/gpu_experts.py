"""Which experts a GPU would have beside all of them on the CPU, and what that changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError
from runtime.devices.gpus import HEADROOM

from ..modules.moe import FusedMoE
from ..modules.placement import ModulePlacement
from ..pinning.choose import Block, choose
from ..pinning.profile import Profile
from .entries import Entry, packed_experts
from .formats import Formats

SUFFIX = ".gpu_experts"
"""Ends the name of the entry of a layer's experts on a GPU, after the block's name."""
CACHE_TOKENS = 2 * 8192
"""Tokens that the KV cache must hold at least: two sequences."""


@dataclass(frozen=True)
class GpuShare:
    """Experts that are on a GPU too.

    Attributes:
        experts: number in all ``layers`` that have any; ``bytes``: that they take on the GPU.
        share: fraction of a token's choices that they take; ``profiled``: whether a text was
            counted, else tokens are taken to choose all experts alike.
        cpu_token_bytes: bytes of routed experts that the CPU reads a token; ``without``: that it
            would read if the GPU had none.
    """

    experts: int
    layers: int
    bytes: int
    share: float
    profiled: bool
    cpu_token_bytes: int
    without: int


def gpu_bytes_for_experts(
    entries: Sequence[Entry], cache_token_bytes: int, gpus: Sequence[str], gpu_gib: float | None
) -> int | None:
    """Estimates the bytes of the GPUs that are left for experts; None if nobody knows.

    Args:
        entries: the model's entries.
        gpu_gib: GiB of each one's memory; None: what is free of this machine's.
    """
    if gpu_gib is not None:
        free = len(gpus) * int(gpu_gib * 2**30)
    elif torch.cuda.device_count() >= len(gpus):
        free = sum(torch.cuda.mem_get_info(device)[0] for device in gpus)
    else:
        return None
    dense = sum(entry.bytes for entry in entries if entry.device in gpus)
    return max(0, free - len(gpus) * HEADROOM - dense - CACHE_TOKENS * cache_token_bytes)


def with_gpu_experts(
    entries: Sequence[Entry],
    asked: int | str | Profile,
    model: PreTrainedModel,
    placement: ModulePlacement,
    formats: Formats,
    free_bytes: int | None,
) -> tuple[list[Entry], GpuShare]:
    """The entries with an entry more for each layer that has experts on its GPU, too.

    Args:
        asked: see ``choose``.
        model: an injected meta model, of which the entries are.
        free_bytes: bytes of the GPUs that experts may take; None if that is not known.

    Raises:
        PykernelsError: a profile or "auto" without ``free_bytes``; no experts of ours; as
            ``choose``.
    """
    if free_bytes is None and not isinstance(asked, int):
        raise PykernelsError(
            "how many experts fit depends on the GPU's memory, and there is no GPU here",
            "Add --gpu-gib 80, or give a number of experts",
        )
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FusedMoE)}
    if not modules:
        raise PykernelsError("this model has no routed experts of ours", "Leave out --gpu-experts")
    on_gpu = {
        name: packed_experts(name, m, formats, placement.of(name)) for name, m in modules.items()
    }
    blocks = {
        name: Block(m.shape.E, on_gpu[name].bytes // m.shape.E, on_gpu[name].device)
        for name, m in modules.items()
    }
    free = dict.fromkeys(
        (b.device for b in blocks.values()), 1 << 62 if free_bytes is None else free_bytes
    )
    expert_ids = {name: ids for name, ids in choose(asked, blocks, free).items() if ids}
    all_entries: list[Entry] = []
    for entry in entries:
        name = entry.name.removesuffix(".experts")
        if not entry.routed or name not in expert_ids:
            all_entries.append(entry)
            continue
        share = _share(asked, name, expert_ids[name], blocks[name].E)
        all_entries.append(replace(entry, token_bytes=round(entry.token_bytes * (1 - share))))
        all_entries.append(
            _gpu_entry(name, on_gpu[name], blocks[name], len(expert_ids[name]), share)
        )
    before, after = (
        sum(entry.token_bytes for entry in listed if entry.routed)
        for listed in (entries, all_entries)
    )
    share_of_gpu = GpuShare(
        sum(map(len, expert_ids.values())),
        len(expert_ids),
        sum(entry.bytes for entry in all_entries if entry.name.endswith(SUFFIX)),
        1 - after / max(1, before),
        isinstance(asked, Profile),
        after,
        before,
    )
    return all_entries, share_of_gpu


def _share(asked: int | str | Profile, name: str, experts: Sequence[int], E: int) -> float:
    """Share of a token's choices in a layer that these experts take."""
    if not isinstance(asked, Profile):
        return len(experts) / E
    counts = asked.counts[name]
    return sum(counts[e] for e in experts) / max(1, sum(counts))


def _gpu_entry(name: str, all_experts: Entry, block: Block, count: int, share: float) -> Entry:
    """The entry of a layer's experts on a GPU; it has no numbers of its own.

    Args:
        all_experts: the entry that all experts would have there.
    """
    return replace(
        all_experts,
        name=f"{name}{SUFFIX}",
        cls=f"{count} of them too",
        parameters=0,
        bytes=block.expert_bytes * count,
        token_bytes=round(all_experts.token_bytes * share),
        routed=False,
    )
