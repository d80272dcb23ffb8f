"""python -m bench.several_gpus.tensor is `pykernels bench tensor`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("tensor")
