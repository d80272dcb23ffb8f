"""Kernels for Mixture-of-Experts inference: pure functions on buffers, in Numba (CPU) and Triton (GPU)."""

__version__ = "0.1.0"
