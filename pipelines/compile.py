"""Compiles the pipeline to the YAML that KFP takes: `python -m tidemill_pipelines.compile FILE`."""

import sys

from kfp import compiler
from tidemill_pipelines.post_training import post_training


def main(path: str) -> None:
    """Write the pipeline to `path`."""
    compiler.Compiler().compile(post_training, package_path=path)


if __name__ == "__main__":
    main(*sys.argv[1:])
