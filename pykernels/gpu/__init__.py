"""Triton kernels with their launchers, each with a twin of the same name in ``pykernels.ref``.

They run compiled on a CUDA GPU, and on any CPU through Triton's interpreter: slowly, at small
sizes, which is how the tests run without a GPU (``TRITON_INTERPRET=1``).
"""
