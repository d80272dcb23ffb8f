"""Single instructions as Numba functions: one LLVM name each, no logic."""
