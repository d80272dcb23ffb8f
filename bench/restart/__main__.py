"""python -m bench.restart is `pykernels bench restart`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("restart")
