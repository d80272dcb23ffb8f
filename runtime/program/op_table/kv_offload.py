"""The rows of the op table that bring keys and values to a GPU (``passes.gpu.offload_kv``)."""

from __future__ import annotations

from .op import Attr, Op, Port

_KV = Port("kv", None, repeated=True)
_STREAM = "copies"  # ``ops.COPIES``

KV_OFFLOAD: dict[str, Op] = {
    # How many pages the step's sequences read, then these, each once; with `window` those of as
    # many last tokens of each.
    "list_pages": Op(
        inputs={
            "table": Port("index", ("rows", "table_pages")),
            "lengths": Port("index", ("rows",)),
        },
        outputs={"pages": Port("int32", ("listed",))},
        attrs={"window": Attr(int, 0)},
    ),
    # These pages of a layer's cache, to the same places of a staging buffer; others of it hold any
    # numbers. Where the staging is an input, its memory is used again.
    "load_pages": Op(
        inputs={
            "pages": Port("int32", ("listed",)),
            "cache": _KV,
            "staging": _KV,
        },
        outputs={"staging": _KV},
        stream=_STREAM,
    ),
    # The rows of the step's tokens, from the staging buffer to their slots of the cache.
    "store_rows": Op(
        inputs={"staging": _KV, "cache": _KV, "slot_mapping": Port("index", ("T",))},
        outputs={"cache": _KV},
        stream=_STREAM,
    ),
}
