"""Compiles a pipeline to the YAML that KFP takes: `python -m tidemill_pipelines.compile NAME FILE`."""

import sys

from kfp import compiler
from tidemill_pipelines.catalogue import pipeline_of


def main(name: str, path: str) -> None:
    """Write the pipeline `name` to `path`."""
    compiler.Compiler().compile(pipeline_of(name), package_path=path)


if __name__ == "__main__":
    main(*sys.argv[1:])
