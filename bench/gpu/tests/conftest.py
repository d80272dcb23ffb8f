"""Kernels run interpreted: the harness is tested, not the GPU."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is decorated
