"""Kernels for Mixture-of-Experts inference: pure functions on buffers."""

__version__ = "0.1.0"
