"""When a sequence's state is copied for those that come later, and for itself after a preemption.

- At marks in a prompt, at which its chunks end: every ``spacing`` pages, or ``stretch`` where a
  step costs as much whatever it has; where it leaves what the
  tree knows, since another one may leave it there, too; and at its last full page. The last two,
  if they are not near another mark, but always where outputs fork.
- At each full page of an output, where it takes the place of the one before: at the end of a turn
  the last one stays.

A copy is asked for when the step is launched that brings the state there. Pages of a prompt are in
the tree by then; those of an output come into it when their last token is known. A step that saves
states on its way need not end at a prompt's last full page: it goes on behind it.
"""

from __future__ import annotations

from .page_table import PageTable
from .prefix import PrefixNode
from .states import NO_SLOT, StateSlots

_NEAR = 4
"""What lies less than a ``_NEAR``-th of the spacing behind another mark is near it, and computed
again: each mark makes one step more of a prompt."""


class Snapshots:
    """Takes and finds snapshots of the states of sequences.

    Args:
        states: where they are.
        page_size: tokens a page.
        spacing: pages from one mark of a prompt to the next; 0: no snapshots.
        most: marks of one prompt at even distances; a longer prompt has them further apart.

    Attributes:
        stretch: pages between marks at even distances, where that is more than ``spacing``: as many
            as a step has at most, where each step brings all experts to a GPU.
        in_steps: whether steps save states on their way.
    """

    def __init__(self, states: StateSlots, page_size: int, spacing: int, most: int) -> None:
        self.states, self.page_size = states, page_size
        self.spacing, self.most = spacing, max(1, most)
        self.stretch = 0
        self.in_steps = False

    def deepest(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """The longest part of a cached prefix that ends with a snapshot."""
        last = next((i for i in range(len(nodes), 0, -1) if nodes[i - 1] in self.states), 0)
        return nodes[:last]

    def mark(self, table: PageTable, cached: int, known: int, tokens: int) -> None:
        """Sets the marks of a sequence of so many tokens that is admitted.

        Args:
            cached: pages that it need not compute; ``known``: those that are in the tree.
        """
        table.marks.clear()
        if not self.spacing:
            return
        full = (tokens - 1) // self.page_size
        spacing = max(self.spacing, self.stretch)
        while full // spacing > self.most:
            spacing *= 2
        marks = {cached, *range(spacing, full + 1, spacing)}
        for mark in (known, full):
            before = max((other for other in marks if other < mark), default=mark)
            if mark - before >= -(-self.spacing // _NEAR) or (table.forks and mark == full):
                marks.add(mark)
        table.marks += sorted(mark for mark in marks if mark > cached)
        table.full = full

    def chunk_end(self, table: PageTable) -> int | None:
        """The token in front of which a sequence's next chunk must end; None: anywhere."""
        if not table.marks or (self.in_steps and table.marks[0] == table.full):
            return None
        return table.marks[0] * self.page_size

    def save_in_step(self, table: PageTable, first: int, last: int) -> tuple[int, int]:
        """A step is scheduled with these tokens of a prompt.

        Returns:
            How many of them are behind a state that it is to save on its way, and the slot for it;
            0 and ``NO_SLOT``: there is none.
        """
        at = table.marks[0] * self.page_size if table.marks and self.in_steps else last
        if not first < at < last or (slot := self.states.take()) == NO_SLOT:
            return 0, NO_SLOT
        table.in_step = slot
        return last - at, slot

    def undo(self, table: PageTable) -> None:
        """Frees the slot of a step that was scheduled and is not launched."""
        self.states.free(table.in_step)
        table.in_step = NO_SLOT

    def reached(self, table: PageTable, computed: int, ends: bool) -> list[PrefixNode]:
        """A step is launched that brings a prompt's state behind ``computed`` tokens, whose pages
        are in the tree.

        Args:
            ends: whether the prompt is complete.

        Returns:
            The pages that have got snapshots.
        """
        saved = self._saved_in_step(table)
        node = self._saved_behind(table, computed, ends)
        return [each for each in (saved, node) if each is not None]

    def _saved_in_step(self, table: PageTable) -> PrefixNode | None:
        slot, table.in_step = table.in_step, NO_SLOT
        if slot == NO_SLOT:
            return None
        self.states.written.add(slot)
        node, behind = table.node, table.cached - table.full
        while node is not None and behind > 0:
            node, behind = node.parent, behind - 1
        if node is None or behind:
            self.states.free(slot)
            return None
        return node if self.states.keep(node, slot) else None

    def _saved_behind(self, table: PageTable, computed: int, ends: bool) -> PrefixNode | None:
        pages, more = divmod(computed, self.page_size)
        marked = False
        while table.marks and table.marks[0] <= pages:
            marked = table.marks.pop(0) == pages
        if more or not (marked or ends) or not self.spacing:
            return None
        node = table.node if table.cached == pages else None
        if node is None or node in self.states:
            return None
        slot = self.states.save(table.slot)
        if slot == NO_SLOT:
            return None
        self.states.keep(node, slot)
        if not marked:
            table.latest = node
        return node

    def decoded(self, table: PageTable, computed: int) -> None:
        """A step is launched that brings an output's state behind ``computed`` tokens."""
        if self.spacing and computed % self.page_size == 0:
            self.states.drop(table.latest)  # its slot is the first to be had
            table.latest = None
            self.states.free(table.saved)
            table.saved = self.states.save(table.slot)

    def finished(self, table: PageTable, computed: int) -> None:
        """The tokens of an output's last full page are known, and it is in the tree."""
        slot, table.saved = table.saved, NO_SLOT
        node = table.node if table.cached * self.page_size == computed else None
        if slot == NO_SLOT:
            return
        if node is None:
            self.states.free(slot)
        elif self.states.keep(node, slot):
            table.latest = node

    def release(self, table: PageTable) -> None:
        """The sequence leaves: its snapshots stay."""
        self.states.free(table.slot)
        self.states.free(table.saved)
        self.states.free(table.in_step)
        table.slot = table.saved = table.in_step = NO_SLOT
        table.latest = table.source = None
        table.marks.clear()
