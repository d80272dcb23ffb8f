"""Packed training rows: documents in a new order each epoch, cut into rows that begin with bos."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .tokenizer import BOS_ID


def pack(stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [S]) as inputs and targets, int64 [S // length, length] each.

    Each input row is bos and `length - 1` tokens, each target row those tokens and the next one;
    bos in front says "some text begins here", be it a file's start or a piece of its middle.
    A remainder shorter than a row is dropped.
    """
    rows = stream.numel() // length
    targets = stream[: rows * length].view(rows, length)
    starts = torch.full((rows, 1), BOS_ID, dtype=stream.dtype, device=stream.device)
    return torch.cat([starts, targets[:, :-1]], dim=1), targets


class TrainingRows:
    """Endless batches, int64 [rows, length] inputs and targets on `device`."""

    def __init__(
        self, documents: list[list[int]], length: int, rows: int, device: torch.device, seed: int
    ) -> None:
        self._documents = [torch.tensor(d, dtype=torch.int64, device="cpu") for d in documents]
        self._length, self._rows, self._device = length, rows, device
        self._generator = torch.Generator().manual_seed(seed)
        self.tokens = sum(len(d) for d in documents)
        self.steps_per_epoch = self.tokens // length // rows
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{self.tokens} training tokens do not fill a batch of {rows} x {length}; "
                "give fewer rows or a larger library"
            )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = self._permutation(len(self._documents)).tolist()
            shift = int(
                torch.randint(
                    self._length, (), generator=self._generator, dtype=torch.int64, device="cpu"
                )
            )
            # A new order and a new offset: hardly a row is seen twice.
            stream = torch.cat([self._documents[i] for i in order]).roll(-shift)
            inputs, targets = pack(stream.to(self._device), self._length)
            shuffle = self._permutation(inputs.shape[0]).to(self._device)
            for step in range(inputs.shape[0] // self._rows):
                part = shuffle[step * self._rows : (step + 1) * self._rows]
                yield inputs[part], targets[part]

    def _permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator, dtype=torch.int64, device="cpu")
