"""Steps of gated delta nets over made-up states, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from pykernels.shapes import StateBatch

SLOTS = 9
# length, slot, past: chunks of 64, blocks of 8 and one token, on both sides of each; padding.
RAGGED = (
    (130, 5, 0),
    (1, 2, 9),
    (64, 7, 3),
    (0, 1, 4),
    (9, -1, 2),
    (65, 0, 0),
    (1, 8, 0),
    (7, 3, 1),
)


def batch_of(
    sequences: Sequence[tuple[int, int, int]], device: torch.device | str = "cpu"
) -> tuple[StateBatch, int]:
    """The batch and its rows: one more, of no sequence, in front of each sequence, and the last
    sequence first."""
    starts, rows = [], 0
    for length, _, _ in reversed(sequences):
        starts.append(rows + 1)
        rows += length + 1
    columns = [list(reversed(starts)), *([row[i] for row in sequences] for i in range(3))]
    vectors = [torch.tensor(x, dtype=torch.int32, device=device) for x in columns]
    return StateBatch(*vectors, max(row[0] for row in sequences)), rows


def rows_of(batch: StateBatch, s: int) -> slice:
    start, length = int(batch.starts[s]), int(batch.lengths[s])
    return slice(start, start + length)


def real(batch: StateBatch) -> list[int]:
    """The sequences that have tokens and a slot."""
    return [s for s in range(batch.S) if batch.lengths[s] > 0 and batch.slots[s] >= 0]


def is_real_row(batch: StateBatch, rows: int) -> torch.Tensor:
    found = torch.zeros(rows, dtype=torch.bool)
    for s in real(batch):
        found[rows_of(batch, s)] = True
    return found


@dataclass(frozen=True)
class DeltaStep:
    """Inputs of the gated delta rule; whatever no kernel may read is NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    batch: StateBatch

    @classmethod
    def random(
        cls,
        sequences: Sequence[tuple[int, int, int]],
        HK: int,
        HV: int,
        DK: int,
        DV: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DeltaStep:
        """Keys have much in common, so that what a token corrects is large."""
        batch, T = batch_of(sequences)
        r = torch.Generator().manual_seed(T + DK)
        q, k = (torch.randn(T, HK, DK, generator=r) for _ in "qk")
        k += torch.randn(HK, DK, generator=r)
        v = torch.randn(T, HV, DV, generator=r)
        g = -(torch.rand(T, HV, generator=r) ** 3) * 4
        beta = torch.rand(T, HV, generator=r)
        state = torch.randn(SLOTS, HV, DK, DV, generator=r)
        nowhere = ~is_real_row(batch, T)
        for x in (q, k, v, g, beta):
            x[nowhere] = torch.nan
        used = [s for s in real(batch) if batch.past[s] > 0]
        state[[i for i in range(SLOTS) if i not in batch.slots[used]]] = torch.nan
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        g, beta, state = (x.to(device) for x in (g, beta, state))
        return cls(q, k, v, g, beta, state, batch_of(sequences, device)[0])

    def fresh(self) -> DeltaStep:
        """The same with a copy of the state."""
        return replace(self, state=self.state.clone())

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta, self.state

    def expected(
        self, recurrent: bool = False, tiled: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' results, NaN in rows of no sequence, and its states."""
        function = torch_recurrent_gated_delta_rule if recurrent else torch_chunk_gated_delta_rule
        out, state = torch.full(self.v.shape, torch.nan), self.state.cpu().clone()
        for s in real(self.batch):
            rows, slot = rows_of(self.batch, s), int(self.batch.slots[s])
            given = [x[rows].cpu().float()[None] for x in self.inputs[:5]]
            groups = given[2].shape[2] // given[0].shape[2]  # not every version repeats heads
            given[:2] = (
                x.repeat(1, 1, groups, 1) if tiled else x.repeat_interleave(groups, 2)
                for x in given[:2]
            )
            before = state[slot][None] if self.batch.past[s] > 0 else None
            found, after = function(
                *given,
                initial_state=before,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            out[rows], state[slot] = found[0], after[0]
        return out, state


@dataclass(frozen=True)
class ConvStep:
    """Inputs of the causal convolution; whatever no kernel may read is NaN."""

    x: torch.Tensor
    weight: torch.Tensor
    state: torch.Tensor
    batch: StateBatch

    @classmethod
    def random(
        cls,
        sequences: Sequence[tuple[int, int, int]],
        C: int,
        K: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ConvStep:
        batch, T = batch_of(sequences)
        r = torch.Generator().manual_seed(T + C)
        x, weight = torch.randn(T, C, generator=r), torch.randn(C, K, generator=r) / 2
        state = torch.randn(SLOTS, K - 1, C, generator=r).to(dtype).float()
        x[~is_real_row(batch, T)] = torch.nan
        used = [s for s in real(batch) if batch.past[s] > 0]
        state[[i for i in range(SLOTS) if i not in batch.slots[used]]] = torch.nan
        x, weight = x.to(device, dtype), weight.to(device, dtype)
        return cls(x, weight, state.to(device), batch_of(sequences, device)[0])

    def fresh(self) -> ConvStep:
        """The same with a copy of the state."""
        return replace(self, state=self.state.clone())

    def expected(self, silu: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' results, NaN in rows of no sequence, and its states (which it has as
        [slots, C, K - 1])."""
        out, state = torch.full(self.x.shape, torch.nan), self.state.cpu().clone()
        weight, K = self.weight.cpu().float(), self.weight.shape[1]
        activation = "silu" if silu else None
        for s in real(self.batch):
            rows, slot = rows_of(self.batch, s), int(self.batch.slots[s])
            x = self.x[rows].cpu().float().T[None]
            if self.batch.past[s] > 0:
                own = state[slot].T.contiguous()[None]
                found = causal_conv1d_update(x, own, weight, activation=activation)
            else:
                found = causal_conv1d_fn(x, weight, activation=activation)
                own = torch.nn.functional.pad(x, (K - 1, 0))[..., -(K - 1) :]
            out[rows], state[slot] = found[0].T, own[0].T
        return out, state
