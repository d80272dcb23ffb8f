"""Slots of states: of running sequences, and of snapshots where a prefix can be taken up again.

A page of keys says what its tokens are, whatever comes behind it; a state is of all tokens up to
one, and is replaced in every step. So a prefix is of use to a recurrent layer only where somebody
has kept a copy of the state: a snapshot, an entry of the prefix tree at the end of a page.
Snapshots take the slots that no sequence has; the least recently used one gives way.

A device copies states between two steps, in the order of ``StateSlots.copies``. Each copy is of the
state behind all steps that are launched by the time it is asked for. So a slot may be given away as
soon as its copy is asked for, but to one that is written beside the steps (``take_apart``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from .prefix import PrefixNode

NO_SLOT = -1


class Below(Protocol):
    """A level behind the snapshots, which is told what becomes of them."""

    def dropped(self, node: PrefixNode, slot: int) -> None:
        """A slot is no page's snapshot any more, and may be written from now on."""


class StateSlots:
    """Slots 0 .. num_slots - 1: free, of a sequence, or of a snapshot.

    Attributes:
        below: the next level; None: there is none.
        copies: (from, to), which a device is to make before the next step.
        written: slots to which the step that runs saves states.
    """

    below: Below | None = None

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.copies: list[tuple[int, int]] = []
        self.written: set[int] = set()
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[PrefixNode, int] = OrderedDict()  # the oldest first

    @property
    def available(self) -> int:
        """Slots that can be had without taking one from a sequence."""
        return len(self._free) + len(self._snapshots)

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._snapshots)

    def __contains__(self, node: PrefixNode | None) -> bool:
        """Whether there is a snapshot at the end of this page."""
        return node in self._snapshots

    def take(self) -> int:
        """A slot for a sequence, or a snapshot to be; ``NO_SLOT`` if sequences have all."""
        if self._free:
            return self._free.pop()
        if not self._snapshots:
            return NO_SLOT
        return self._dropped(*self._snapshots.popitem(last=False))

    def take_apart(self) -> int:
        """A slot for whoever writes it before the copies are made that are to be: none of them has
        to do with it; ``NO_SLOT`` if there is none."""
        copied = self.written.union(*self.copies)
        for i, slot in enumerate(self._free):
            if slot not in copied:
                return self._free.pop(i)
        for node, slot in self._snapshots.items():
            if slot not in copied:
                return self._dropped(node, self._snapshots.pop(node))
        return NO_SLOT

    def slot_of(self, node: PrefixNode) -> int:
        """The slot of a page's snapshot; the page has one."""
        return self._snapshots[node]

    def begin(self, node: PrefixNode | None) -> int:
        """A slot for a sequence that goes on behind the snapshot at ``node``, or from nothing."""
        if node is None:
            return self.take()
        self._snapshots.move_to_end(node)
        source = self._snapshots[node]
        slot = self.take()
        if slot != source:  # else it was the only slot to be had
            self.copies.append((source, slot))
        return slot

    def save(self, slot: int) -> int:
        """A slot with a copy of a sequence's state, for ``keep``; ``NO_SLOT`` if there is none."""
        copy = self.take()
        if copy != NO_SLOT:
            self.copies.append((slot, copy))
        return copy

    def keep(self, node: PrefixNode, slot: int) -> bool:
        """Makes a slot the snapshot of a page; False, and the slot is free, if it has one."""
        if node in self._snapshots:
            self._snapshots.move_to_end(node)
            self.free(slot)
            return False
        self._snapshots[node] = slot
        return True

    def free(self, slot: int) -> None:
        """Gives a slot back."""
        if slot != NO_SLOT:
            self._free.append(slot)

    def drop(self, node: PrefixNode | None) -> None:
        """Forgets the snapshot of a page, if it has one."""
        if node is not None and node in self._snapshots:
            self._free.append(self._dropped(node, self._snapshots.pop(node)))

    def _dropped(self, node: PrefixNode, slot: int) -> int:
        if self.below is not None:
            self.below.dropped(node, slot)
        return slot

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies that are to be made now, while no step runs."""
        copies, self.copies = self.copies, []
        self.written.clear()
        return copies
