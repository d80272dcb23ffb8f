"""Compiled kernels on disk.

Numba's own cache sees no change in another file (an intrinsic's, say), and it never hits for
kernels that a factory builds, since compiled functions in a closure have no stable hash. Here each
kernel has files of its own, named by its key (``key``): an edit compiles again what it is part
of, and going back finds what was there before. Files that nobody loaded for a month are deleted
when another kernel is written.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import (
    FunctionCache,
    IndexDataCacheFile,
    NullCache,
    UserProvidedCacheLocator,
)

from ...env import env
from ...errors import PykernelsError
from .key import key_of

MONTH = 30 * 24 * 3600.0
MARK = ".compiled"
"""Ending of an empty file that says of several kernels that they are here."""

_DAY = 24 * 3600.0
_LONGEST = 120  # characters of a kernel's name in a file's: 255 are what most systems have


def kernels_folder() -> Path:
    """Where kernels are kept, of every version and CPU."""
    return env.cache_dir / "kernels"


def cache_of(function: Callable, variant: str) -> Any:
    """The cache of one kernel, or one that keeps nothing: in the debug mode, and where ``key_of``
    says so."""
    key = None if env.debug else key_of(function, variant)
    return NullCache() if key is None else _KernelCache(function, key)


class _Locator(UserProvidedCacheLocator):
    """``kernels_folder``, whether it can be written or not. Numba's own locators would fall back to
    folders where nothing tells that another file has changed."""

    def __init__(self, function: Callable, file: str) -> None:
        self._cache_path = str(kernels_folder())

    @classmethod
    def from_function(cls, function, file):
        return cls(function, file)

    def get_source_stamp(self) -> str:
        return ""  # the key says it all

    def get_disambiguator(self) -> str:
        return ""


class _Files(FunctionCache._impl_class):
    _locator_classes = [_Locator]

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return re.sub(r"[^\w.,=+\[\]-]", "", fullname)[:_LONGEST]


class _KernelCache(FunctionCache):
    _impl_class = _Files

    def __init__(self, function: Callable, key: str) -> None:
        super().__init__(function)
        base = f"{self._impl.filename_base}-{key}"
        self._cache_file = IndexDataCacheFile(self._cache_path, base, "")

    def _index_key(self, sig, codegen):
        return sig, codegen.magic_tuple()

    def load_overload(self, sig, target_context):
        """Loads what is cached; a damaged file counts as none: it is compiled and written again."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # unpickling half a file raises anything
            with contextlib.suppress(OSError):  # ``save_overload`` will tell
                self.flush()
            return None
        if found is not None:
            _mark(Path(self._cache_file._index_path))
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            raise PykernelsError(
                f"compiled kernels cannot be kept in {self.cache_path}: {error.strerror}",
                "Free some space, or point PYKERNELS_CACHE_DIR at a folder that you may write to",
            ) from None
        _forget_unused(env.cache_dir)


def _mark(index: Path) -> None:
    """Marks a kernel as used today; it is one file of a few (``name.nbi``, ``name.1.nbc``)."""
    with contextlib.suppress(OSError):  # of another user
        if index.stat().st_mtime < time.time() - _DAY:
            os.utime(index)


@functools.cache  # once a process
def _forget_unused(folder: Path) -> None:
    """Deletes the kernels that nobody used for a month, and the folders of older versions."""
    long_ago = time.time() - MONTH
    with contextlib.suppress(OSError):  # of another user, or deleted by another process just now
        kernels = folder / "kernels"
        for index in (*kernels.glob("*.nbi"), *kernels.glob(f"*{MARK}")):
            if index.stat().st_mtime < long_ago:
                for data in index.parent.glob(f"{glob.escape(index.stem)}.*"):
                    data.unlink(missing_ok=True)
        for old in folder.iterdir():  # one for each version of all kernels, once
            named = re.fullmatch("[0-9a-f]{16}", old.name)
            if named and old.is_dir() and old.stat().st_mtime < long_ago:
                shutil.rmtree(old, ignore_errors=True)
