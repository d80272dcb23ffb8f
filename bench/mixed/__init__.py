"""`pykernels bench mixed`: a prompt that arrives while other sequences decode."""
