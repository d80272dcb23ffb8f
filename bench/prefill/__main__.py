"""python -m bench.prefill is `pykernels bench prefill`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("prefill")
