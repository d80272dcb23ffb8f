"""The embedding gather on the calling thread."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ...quant import PackedMatrix
from ..embedding import EMBED, make_embed, make_embed_packed
from .checks import check_tensor, integers, number
from .serial import Record, counted, run_tasks


def embed(
    ids: torch.Tensor, table: torch.Tensor | PackedMatrix, scale: float = 1.0
) -> torch.Tensor:
    """Rows of ``table`` on the calling thread alone.

    Args:
        ids: int32 or int64 [...].
        table: contiguous bfloat16 [V, H], or packed in any format, of which only the rows that are
            looked up are dequantized.
        scale: that rows are multiplied by.

    Returns:
        float32 [..., H].

    Raises:
        PykernelsError: inputs that do not fit; an id outside ``0..V-1``, whose row is NaN in
            ``ref.embed``.
    """
    dims = [f"n{i}" for i in range(getattr(ids, "ndim", 0))]
    ids = integers("ids", ids, *dims)
    if isinstance(table, PackedMatrix):
        tasks = make_embed_packed(table.fmt.name)
        where = {
            "table": table.blocks,
            "scale": table.scales,
            "block_bytes": table.blocks.shape[1],
            "scale_bytes": table.scales.shape[1],
        }
    else:
        check_tensor("table", table, ("V", "H"), (torch.bfloat16,))
        if not table.is_contiguous():
            raise PykernelsError(f"table has strides {table.stride()}", "Make it contiguous")
        tasks, where = make_embed(), {"table": table}
    V, H = table.shape
    out = torch.empty(*ids.shape, H, dtype=torch.float32, device="cpu")
    record = Record(
        EMBED,
        count_at=counted(ids.numel()),
        ids=ids,
        V=V,
        H=H,
        out=out,
        out_stride=4 * H,
        chunk=max(1, ids.numel()),
        factor=number("scale", scale),
        **where,
    )
    if run_tasks(tasks, record.address):
        raise PykernelsError(
            f"ids from {int(ids.min())} to {int(ids.max())} for a table of {V} rows",
            f"Give ids from 0 to {V - 1}",
        )
    return out
