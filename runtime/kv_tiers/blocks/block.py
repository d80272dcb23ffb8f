"""One block as a file: a header that says what it is, and its bytes with a checksum.

A block is a page of the KV cache or a state behind one. The header names the model
(``fingerprint``), the page (its key and its parent's, see ``kv_cache.prefix``) and its tokens, so a
reader knows every byte of it but the checksums before it reads. Numbers are little-endian:

    8 magic, 4 kind (0 page, 1 state), 4 bytes of tokens, 8 bytes of the payload, 16 fingerprint,
    16 key, 16 parent's key, the tokens as int32, 4 CRC-32 of the payload, 4 CRC-32 of all before;
    zeros up to ``ALIGN``; the payload.

Nothing in a block is code, and nothing of one is taken before its checksums are found right.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isal import isal_zlib  # zlib's CRC-32, at the rate of memory

from ...kv_cache.layout import PAGE
from ...kv_cache.page_store import Kind

VERSION = 1
"""Of the format, of the keys, and of what the kernels write into a page: another version of any of
them reads other blocks."""
MAGIC = b"pykv%04d" % VERSION
ALIGN = 512
_FIELDS = struct.Struct("<8sIIQ16s16s16s")
_NAMED = slice(24, _FIELDS.size)
_CHECKS = struct.Struct("<II")

Buffer = memoryview | bytearray | bytes


SUFFIXES = {kind: f".{kind.name.lower()}" for kind in Kind}
"""Of files' names."""


@dataclass(frozen=True)
class BlockName:
    """Which block: of which page of which model.

    Attributes:
        fingerprint: 16 bytes, of all that decides what is in a page besides its tokens.
        key: 16 bytes, of the page; ``parent``: of the one before it.
        tokens: of the page, as they are in its key.
    """

    kind: Kind
    fingerprint: bytes
    key: bytes
    parent: bytes
    tokens: bytes

    @property
    def file(self) -> str:
        """Its file's name in the model's folder."""
        return self.key.hex() + SUFFIXES[self.kind]

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the payload."""
        return header_bytes(len(self.tokens))

    def header(self, payload: Sequence[Buffer]) -> bytes:
        """The header of a block with this payload, whose parts follow each other."""
        nbytes = sum(len(part) for part in payload)
        known = self._known(nbytes)
        return _checked(known, checksum(payload)).ljust(self.header_bytes, b"\0")

    def fits(self, header: Buffer, payload: Sequence[Buffer]) -> bool:
        """Tells whether what was read is this block, whole."""
        return bytes(header) == self.header(payload)

    def is_in(self, header: Buffer) -> bool:
        """Whether a header names this block, whole or not."""
        return bytes(header[_NAMED]) == self._known(0)[_NAMED]

    def _known(self, nbytes: int) -> bytes:
        sizes = self.kind, len(self.tokens), nbytes
        names = self.fingerprint, self.key, self.parent
        return _FIELDS.pack(MAGIC, *sizes, *names) + self.tokens


def header_bytes(tokens: int) -> int:
    """Bytes in front of the payload of a block with so many bytes of tokens."""
    return -(-(_FIELDS.size + tokens + _CHECKS.size) // ALIGN) * ALIGN


HEADER = header_bytes(4 * PAGE)
"""Of a page's block, and of a state's."""


def checksum(parts: Sequence[Buffer]) -> int:
    """CRC-32 of parts one behind the other."""
    found = 0
    for part in parts:
        found = isal_zlib.crc32(part, found)
    return found


def _checked(known: bytes, payload: int) -> bytes:
    known += struct.pack("<I", payload)
    return known + struct.pack("<I", isal_zlib.crc32(known))


def why_damaged(data: Buffer, name: str) -> str | None:
    """Says what is wrong with a file of this name and content; None: nothing is.

    It needs no model: whether the block is the one that a name of a model asks for says
    ``BlockName.fits``.
    """
    if len(data) < _FIELDS.size:
        return "it is too short"
    magic, kind, tokens, nbytes, fingerprint, key, parent = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        return "it is no block, or one of another version"
    start = header_bytes(tokens)
    if kind not in tuple(Kind) or len(data) != start + nbytes:
        return "it has another size than it says"
    own = BlockName(
        Kind(kind), fingerprint, key, parent, bytes(data[_FIELDS.size : _FIELDS.size + tokens])
    )
    if own.file != name:
        return "it is another block than its name says"
    view = memoryview(data)
    return None if own.fits(view[:start], [view[start:]]) else "its checksum is wrong"
