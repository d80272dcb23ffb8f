"""python -m bench.cache is `pykernels bench cache`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("cache")
