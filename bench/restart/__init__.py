"""`pykernels bench restart`: a conversation that is taken up after the process has ended."""
