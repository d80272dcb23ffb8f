"""python -m bench.contexts is `pykernels bench contexts`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("contexts")
