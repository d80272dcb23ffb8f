"""One table and three plots a machine: python -m bench.cpu, or make bench-cpu."""
