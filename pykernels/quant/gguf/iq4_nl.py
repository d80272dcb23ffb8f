"""IQ4_NL and IQ4_XS: codes of 4 bits into a table of integers.

Source: ``block_iq4_nl``, ``block_iq4_xs`` and ``kvalues_iq4nl`` of ggml (``ggml-common.h``).
"""

from __future__ import annotations

import torch

from .base import GGUF, Blocks

VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    dtype=torch.float32,
    device="cpu",
)
"""float32 [16]: the value of every code, times the scale a weight; exact in bfloat16."""

_MIDPOINTS = (VALUES[:-1] + VALUES[1:]) / 2


class IQ4NL(GGUF):
    """Blocks of 32 inputs. A stored one: fp16 scale; 16 bytes with the codes, those of
    inputs 0 to 15 in the low halves. The largest magnitude of a block becomes -127 times its
    scale."""

    name, bits = "iq4_nl", 4
    int8_kind = "q8"
    error = "block amax * 14 / 127 * 1.01, and 4e-6 (fp16 scales)"
    share, floor = 14 / 127, 4e-6
    k_multiple, stored_bytes = 32, 18
    halves_at, halves, small = slice(0, 2), 1, 0

    def split(self, raw: torch.Tensor) -> Blocks:
        codes = torch.cat((raw[:, 2:] & 15, raw[:, 2:] >> 4), dim=1)
        return Blocks(codes, self.stored_halves(raw), raw[:, :0])

    def join(self, blocks: Blocks) -> torch.Tensor:
        low, high = blocks.codes[:, :16], blocks.codes[:, 16:]
        return torch.cat((blocks.halves.view(torch.uint8), low | high << 4), dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        return blocks.halves.float() * VALUES[blocks.codes.long()]

    def fit(self, x: torch.Tensor) -> Blocks:
        scale = x.gather(1, x.abs().argmax(1, keepdim=True)) / VALUES[0]
        inverse = 1 / scale  # of the scale before it is fp16
        inverse = torch.where(inverse.isfinite(), inverse, 0)
        codes = torch.bucketize((x * inverse).contiguous(), _MIDPOINTS).to(torch.uint8)
        return Blocks(codes, scale.to(torch.float16), codes[:, :0])


_HIGH = torch.arange(0, 16, 2, dtype=torch.int32, device="cpu")


class IQ4XS(GGUF):
    """Superblocks of 256 inputs: ``w = d * sc * value`` with a signed ``sc`` of 6 bits for 32.

    A stored one: fp16 ``d``; a word of 16 bits with the high 2 bits of each ``sc + 32``; 4 bytes
    with the low 4 bits; the codes of each 32 inputs as in IQ4_NL. ``small`` is sc in two's
    complement.
    """

    name, bits = "iq4_xs", 4
    int8_kind = "q8_k"
    error = "superblock amax * (14 / 127 + 1 / 32) * 1.01, and 1e-4 (fp16 scales)"
    share, floor = 0.142 * 1.01, 1e-4
    k_multiple = k_block = 256
    stored_bytes, halves_at, halves, small = 136, slice(0, 2), 1, 8

    def split(self, raw: torch.Tensor) -> Blocks:
        high = raw[:, 2:4].contiguous().view(torch.int16).int() >> _HIGH & 3
        low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), dim=2).view(-1, 8)
        nibbles = raw[:, 8:].reshape(-1, 8, 16)
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=2).view(-1, 256)
        return Blocks(codes, self.stored_halves(raw), (low | high.to(torch.uint8) << 4) - 32)

    def join(self, blocks: Blocks) -> torch.Tensor:
        steps = blocks.small + 32
        high = ((steps >> 4).int() << _HIGH).sum(1, keepdim=True).to(torch.int16)
        codes = blocks.codes.view(-1, 8, 32)
        parts = (
            blocks.halves.view(torch.uint8),
            high.view(torch.uint8),
            steps[:, 0::2] & 15 | (steps[:, 1::2] & 15) << 4,
            (codes[..., :16] | codes[..., 16:] << 4).view(-1, 128),
        )
        return torch.cat(parts, dim=1)

    def values(self, blocks: Blocks) -> torch.Tensor:
        table = VALUES[blocks.codes.long()].view(-1, 8, 32)
        return (self._scales(blocks) * table).view(-1, 256)

    def fit(self, x: torch.Tensor) -> Blocks:
        groups = x.view(-1, 8, 32)
        scale = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0] / VALUES[0]  # [B, 8]
        peak = scale.gather(1, scale.abs().argmax(1, keepdim=True))
        halves = (peak / -32).to(torch.float16)
        steps = torch.where(halves != 0, scale / halves.float(), 0).round().clamp(-32, 31)
        small = steps.to(torch.int8).view(torch.uint8)
        step = self._scales(Blocks(x, halves, small))
        wanted = torch.where(step != 0, groups / step, 0).contiguous()
        codes = torch.bucketize(wanted, _MIDPOINTS).to(torch.uint8)
        return Blocks(codes.view(-1, 256), halves, small)

    @staticmethod
    def _scales(blocks: Blocks) -> torch.Tensor:
        """The scale of every 32 inputs, float32 [B, 8, 1]."""
        return (blocks.small.view(torch.int8) * blocks.halves.float())[..., None]
