"""The command line of scalax: the script `scalax`, and `python -m scalax`.

`main` parses the command line (`_arguments`), runs the command (`_commands`) and returns the exit code.
`main_process` does the same for the process that the user started, and runs commands that compile in a child
process (`_compiler_process`).
"""

from scalax.cli._arguments import main, main_process
from scalax.cli._exit_codes import ExitCode

__all__ = ['ExitCode', 'main', 'main_process']
