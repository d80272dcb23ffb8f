"""The ``cuda`` device: a program's nodes as launches on one GPU, captured in CUDA graphs."""
