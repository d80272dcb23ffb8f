"""`pykernels bench disagg`: requests that decode beside prompts, on one GPU and on a GPU each."""
