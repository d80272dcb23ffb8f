"""`Linear`: a dense linear whose matrix stays packed, in the checkpoint's format or in another."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from pykernels import quant
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.weights import supports_format
from pykernels.quant import PackedMatrix, Weight, get_format
from pykernels.quant.layout import padded
from runtime.devices.cpu.one_node import OneNode, one_linear
from runtime.workers.matrix import packer, weights_on
from runtime.workers.pool import default_pool

from .registry import ModuleContext, Operator, operator

_FEW = 8
"""Rows of the program that is kept: one pass of tiles."""


@operator
class Linear(Operator):
    """A linear on our kernels: one packed matrix, no copy of it in another dtype. Inference only.

    In the engine it says in which format the matrix is packed; eagerly it is also what multiplies.

    Rule's kwargs: `format` auto (as stored), or one of `pykernels.quant.FORMATS` to convert to
    while loading. Rule's device: where the engine runs it, cpu or a GPU; none: with what is around
    it.

    Source: KTransformers (SOSP 2025), Listing 1 (its MarlinLinear).
    """

    def __init__(self, original: Any, context: ModuleContext, *, format: str = "auto") -> None:
        super().__init__(original, context)
        name = context.name
        if not isinstance(original, nn.Linear):
            raise PykernelsError(
                f"{name} is a {type(original).__name__}, no torch.nn.Linear",
                "Add class: torch.nn.Linear to the rule's match",
            )
        if format not in ("auto", *quant.FORMATS):
            raise PykernelsError(
                f"{name}: there is no format {format!r}", f"Use auto, {', '.join(quant.FORMATS)}"
            )
        if name == "lm_head" and getattr(context.config, "tie_word_embeddings", False):
            raise PykernelsError(
                f"{name} is tied to the embedding, which is no linear",
                "Leave it out of the rule: name: ^(?!lm_head$).*$",
            )
        self.name, self.format, self.placed = name, format, context.device
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight, self.bias = original.weight, original.bias
        self._packed: PackedMatrix | None = None
        self._few: OneNode | None = None
        self._turn = threading.Lock()  # several threads may run a model
        if format != "auto":
            self.check(format)

    def packed_format(self, stored: str) -> str:
        """Name of the format that the matrix is packed in, if the checkpoint has `stored`."""
        return stored if self.format == "auto" else self.format

    def check(self, fmt: str) -> None:
        """Raise `PykernelsError` if this matrix cannot be in a format, on its device."""
        K, stored = self.in_features, get_format(fmt)
        reason = None
        if K % stored.k_multiple:
            reason = f"{fmt} takes inputs in multiples of {stored.k_multiple}, not {K}"
        elif self.placed not in (None, "cpu"):
            reason = supports_format(stored, K)
        if reason is not None:
            raise PykernelsError(f"{self.name}: {reason}", "Exclude it in the rule's name")

    def packed_bytes(self, fmt: str) -> int:
        """Memory of the packed matrix."""
        blocks = padded(self.out_features, 1)[0] // 32
        stored = get_format(fmt)
        return blocks * (
            stored.block_bytes(self.in_features) + stored.scale_bytes(self.in_features)
        )

    def load(self, fmt: str, weight: Weight) -> None:
        """Packs the matrix, in ``fmt``; the parameter is gone then."""
        stored = get_format(fmt)
        stored.check(weight, self.out_features, self.in_features, self.name)
        pool = default_pool()
        self._packed = PackedMatrix.of(stored, [weight], packer(pool), weights_on(pool.memory))
        self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N], in the same dtype; products take x as bfloat16.

        Raises:
            PykernelsError: before the weights are loaded.
        """
        rows = x.reshape(-1, self.in_features)  # [T, K]
        if self._packed is None:
            raise PykernelsError(f"{self.name} is not loaded", "Load with model.from_pretrained")
        out = self._multiply(self._packed, rows)
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        packed = "not loaded" if self._packed is None else str(self._packed)
        return f"{self.out_features} x {self.in_features}, format={self.format}, {packed}"

    def _multiply(self, matrix: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
        """[T, N] on the CPU, as the engine multiplies."""
        pool, T = default_pool(), len(rows)
        if T == 0:
            return rows.new_zeros(0, self.out_features)
        with self._turn:
            node = self._few
            if T > _FEW or node is None or node.pool is not pool:
                node = one_linear(matrix, self.bias, pool, max(T, _FEW))
                self._few = node if T <= _FEW else self._few
            node.begin(rows)
            return node.result(rows.dtype)

    def _save_to_state_dict(self, *_: object) -> None:
        raise PykernelsError(
            f"{self.name}: packed matrices are in no state dict",
            "Copy the checkpoint's own files instead of saving the model",
        )


def linears(model: nn.Module) -> dict[str, Linear]:
    """The linears of a model, by the names of their weights."""
    by_name = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    return {f"{name}.weight": module for name, module in by_name.items()}
