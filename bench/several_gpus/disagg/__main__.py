"""python -m bench.several_gpus.disagg is `pykernels bench disagg`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("disagg")
