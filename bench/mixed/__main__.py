"""python -m bench.mixed is `pykernels bench mixed`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("mixed")
