"""The command line of scalax: the script `scalax`, and `python -m scalax`.

`main` parses the command line (`_arguments`), runs the command (`_commands`) and returns the exit code.
"""

from scalax.cli._arguments import main
from scalax.cli._exit_codes import ExitCode

__all__ = ['ExitCode', 'main']
