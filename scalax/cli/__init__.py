"""What can be asked without writing a program? `python -m scalax plan`, `search`, `explain`
and `topologies`.

``_arguments`` reads the command line, ``_load`` the user's file, ``_commands`` answers.
"""

from scalax.cli._arguments import main

__all__ = ['main']
