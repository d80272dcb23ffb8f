"""python -m bench.load is `pykernels bench load`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("load")
