"""Sampling on the CPU, twin of ``ref.sampling.sample_requests``: three ops, scan, draw and finish.

- *scan*: a task takes a chunk of a row: applies mask, bias and penalties, keeps the largest of each
  lane of its groups, and sums exps for the logprob.
- *draw*: a task takes a chunk of a row where neither top-k nor min-p counts: its best draw.
- *finish*: a task takes a row: merges its chunks; finds the k-th largest by bisection over the
  maxima and the few logits that reach their k-th; then accepts the best draw if less than top-p of
  the mass lies above it, or goes on with those above. There is no sort.

A draw is an argmax of logits with Gumbel's noise, which raises no token by more than 16.64: noise
is made only for those that can still win.
"""

from .args import (
    COLUMNS,
    SAMPLING,
    TABLES,
    Sizes,
    sampling_at,
    sizes,
)
from .call import SamplingCall, make_ops, prepare, sample, sample_requests
from .draw import make_draw
from .finish import make_finish
from .scan import make_scan

__all__ = [
    "COLUMNS",
    "SAMPLING",
    "TABLES",
    "SamplingCall",
    "Sizes",
    "make_draw",
    "make_finish",
    "make_ops",
    "make_scan",
    "prepare",
    "sample",
    "sample_requests",
    "sampling_at",
    "sizes",
]
