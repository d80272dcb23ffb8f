"""By which ways nodes hand pages to each other, and what a node says of it."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import TransferBlocks
from .endpoint import why_not

TRANSFER = "transfer"


@dataclass(frozen=True)
class Handover:
    """What an engine shares with others of its model.

    Attributes:
        ways: their names, "transfer tcp", "store", "disk": the one that is used first is first.
        described: the same in a line.
        transfer: the memory that others read; None: they do not.
    """

    ways: tuple[str, ...]
    described: str
    transfer: TransferBlocks | None


def handover(transfer: TransferBlocks | None, store: str, disk: str, page_size: int) -> Handover:
    """What these make.

    Args:
        store, disk: address and directory that are shared; "": there is none.
    """
    ways, told = list[str](), list[str]()
    if transfer is not None:
        ways.append(f"{TRANSFER} {transfer.protocol}")
        lent = transfer.lent
        told.append(
            f"by Mooncake's Transfer Engine ({transfer.protocol}) at {transfer.peer.session}, from"
            f" {len(lent.memory) / 2**30:.2g} GiB, which hold {lent.layout.slots[0] * page_size:,}"
            " tokens"
        )
    if store:
        ways.append("store")
        told.append(f"by the store {store}")
    if disk:
        ways.append("disk")
        told.append(f"by the directory {disk}")
    line = f"pages go to other nodes {', and '.join(told)}"
    if transfer is None and not store:
        line += f" ({why_not() or 'no Transfer Engine: kv_transfer is off'})"
    return Handover(tuple(ways), line, transfer)
