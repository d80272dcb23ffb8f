"""Records of int64 words that kernels read through their address: ``args = args_at(address)``.

A Numba record returned from a function is an LLVM value of as many bytes, which takes LLVM seconds
to take apart. This is a pointer whose attributes are loads and stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    lower_setattr_generic,
    register_model,
)

from .codegen import pointer
from .registers import I64


class Descriptor(types.Type):
    """The address of a record of int64 fields."""

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        self.fields = fields
        super().__init__(f"descriptor({name}: {', '.join(fields)})")


@register_model(Descriptor)
class _Model(PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, I64)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = Descriptor

    def generic_resolve(self, descriptor, name):
        return types.int64 if name in descriptor.fields else None


def _field(builder, descriptor, address, name):
    offset = I64(8 * descriptor.fields.index(name))
    return pointer(builder, builder.add(address, offset), I64)


@lower_getattr_generic(Descriptor)
def _get(context, builder, descriptor, address, name):
    return builder.load(_field(builder, descriptor, address, name))


@lower_setattr_generic(Descriptor)
def _set(context, builder, sig, args, name):
    address, value = args
    builder.store(value, _field(builder, sig.args[0], address, name))


def descriptor(name: str, fields: Sequence[str]) -> tuple[np.dtype, Any]:
    """(the record's numpy dtype, ``at(address)`` for kernels)."""
    kind = Descriptor(name, tuple(fields))

    @intrinsic
    def at(typingctx, address):
        return kind(types.intp), lambda context, builder, sig, args: args[0]

    return np.dtype([(field, np.int64) for field in fields]), at
