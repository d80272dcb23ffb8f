"""Without a GPU, kernels run interpreted: the harness is tested, not the GPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is decorated
