"""python -m bench.several_gpus.dslp is `pykernels bench dslp`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("dslp")
