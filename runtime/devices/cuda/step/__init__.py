"""One step on GPUs: launches in graphs, and where these meet each other and the CPU."""
