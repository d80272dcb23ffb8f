"""python -m bench.drafts is `pykernels bench drafts`."""

from bench.harness.keeping.as_module import run

if __name__ == "__main__":
    run("drafts")
