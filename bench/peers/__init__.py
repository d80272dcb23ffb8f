"""Other people's expert kernels, each in a process of its own, timed in turns with ours."""
