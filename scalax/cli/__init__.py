"""The command line of scalax: `python -m scalax plan`, `search`, `explain` and `topologies`.

`main` parses the command line (`_arguments`), runs the command (`_commands`) and returns the exit code.
"""

from scalax.cli._arguments import main

__all__ = ['main']
