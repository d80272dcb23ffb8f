"""`pykernels serve`, and a client for `pykernels chat`."""
