"""Tile sizes and the worker's scratch, from head sizes and the width of vectors."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PykernelsError
from .args import PAGE

_TILE_FLOATS = 72 * 1024
"""A tile has so many queries and sums together: they lie in L2 beside a page of keys and values."""


@dataclass(frozen=True)
class Layout:
    """Tiles and strips of one kernel; a block of rows meets one strip at a time.

    Attributes:
        D_K, D_V: numbers of a key and of a value.
        N: floats of a vector.
        codes: the first so many numbers of a key, and all of a value, are E4M3 with a scale; 0:
            bfloat16. What is behind them in a key is bfloat16, of pages of its own.
        tile_rows: of a tile, at most; 0: what L2 holds.
    """

    D_K: int
    D_V: int
    N: int
    codes: int = 0
    tile_rows: int = 0

    def __post_init__(self) -> None:
        sizes = {"D_K": self.D_K, "D_V": self.D_V, "codes": self.codes or self.D_K}
        for name, D in sizes.items():
            if D < 16 or D % 16:
                raise PykernelsError(
                    f"attention with {name} = {D}", "Head sizes must be multiples of 16"
                )

    @property
    def name(self) -> str:
        coded = f"-e4m3-{self.codes}" if self.codes else ""
        return f"{self.D_K}-{self.D_V}-x{self.N}{coded}"

    @property
    def rows(self) -> int:
        """Most rows of a tile."""
        return self.tile_rows or max(32, min(256, _TILE_FLOATS // (self.D_K + self.D_V) // 32 * 32))

    @property
    def key_vectors(self) -> int:
        """Vectors of a strip of keys: 6 rows by 4 sums fill 32 registers, 6 by 2 fill 16."""
        return 4 if self.N == 16 else 2

    @property
    def value_vectors(self) -> int:
        """Vectors of a strip of values."""
        vectors = self.D_V // self.N
        most = self.key_vectors
        return next(n for n in range(most, 0, -1) if vectors % n == 0)

    @property
    def interleaved(self) -> bool:
        """Whether values and sums lie as even and odd numbers, a vector of each in turns."""
        return self.value_vectors % 2 == 0

    @property
    def fetch_steps(self) -> int:
        """Steps of a product (a number of the keys, or a key) for each cache line that is fetched
        meanwhile: 8 rows fetch one page while they meet another."""
        return 1 if self.N == 16 else 4

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of a value, and of a key's first numbers."""
        return 1 if self.codes else 2

    @property
    def row_lines(self) -> tuple[int, int]:
        """Cache lines of a key and of a value."""
        key, value = self.number_bytes * (self.codes or self.D_K), self.number_bytes * self.D_V
        return -(-key // 64), -(-value // 64)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part of the scratch begins (bytes), and its ``end``."""
        sizes = {
            "q": 4 * self.rows * self.D_K,  # float32 [rows, D_K], times scale and log2 e
            "o": 4 * self.rows * self.D_V,  # float32 [rows, D_V]
            "s": 4 * self.rows * PAGE,  # float32 [rows, PAGE]
            "l": 4 * self.rows * self.N,  # float32 [rows, N]
            "m": 4 * self.rows,
            "alpha": 4 * self.rows,
            "lows": 8 * self.rows,
            "ends": 8 * self.rows,
            "key_lines": 8 * (PAGE * self.row_lines[0] + self.D_K),  # pages.make_list_lines
            "value_lines": 8 * (PAGE * self.row_lines[1] + PAGE),
            "key_scales": 4 * PAGE,  # float32 [PAGE], of E4M3, times 2**60
            "value_scales": 4 * PAGE,
            "keys": 4 * self.D_K * PAGE,  # float32 [strip][D_K][keys of a strip]
            "values": 4 * self.D_V * PAGE,  # float32 [strip][PAGE][numbers of a strip]
        }
        found, at = {}, 0
        for part, size in sizes.items():
            found[part] = at
            at += -(-size // 64) * 64
        return found | {"end": at}
