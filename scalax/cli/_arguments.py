"""The command line: its parser, and the exit code of each outcome."""

from __future__ import annotations

import argparse
import functools
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scalax.cli import _commands
from scalax.errors import MissingDependencyError, PlanError, ScalaxError

FITS, FAILED, USAGE, TOO_LARGE = 0, 1, 2, 3

_MOST = 1 << 24  # devices, slices
_LONGEST = 20  # digits of a number

_TOPOLOGY = 'the TPU slice, such as v5p:4x4x4, or nodes of GPUs, such as h100:4x8'
_EPILOG = """\
exit codes: 0 it fits, 3 it does not, 2 the command is invalid, 1 any other failure
"""
_PLAN = """\
Compiles a step for a mesh, without running it, and shows what each device holds, what the devices
send to one another, and what bounds the step.

FILE.py:make_step names a function in a file. It is called with a MeshShardingHelper, and returns
the step (such as helper.sjit makes) and the tuple of its arguments, which may be
jax.ShapeDtypeStruct.
"""
_SEARCH = """\
Plans a step on every mesh of a slice, quickly; in full where only that says whether the best fits.
Ranks the meshes, and says why each of the others lost. Ctrl-C ranks those that were planned so far.

FILE.py:make_step as in `plan`.
"""
_FIND = """\
Finds a mesh and a sharding rule for a step that is written for one device: plans it with one layout
after another. Ctrl-C gives the best so far.

FILE.py:make_step names a function in a file. It is called without arguments, and returns the step,
a function of one device, and the tuple of its arguments, which may be jax.ShapeDtypeStruct.
"""
_EXPLAIN = """\
Shows the sharding of each leaf, and the rule that decided it. Nothing is compiled.

FILE.py:make_state names a function in a file. It is called with a MeshShardingHelper, and returns
a tree (its leaves may be jax.ShapeDtypeStruct) and the rules for it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: the arguments; those of the process by default.

    Returns:
        The exit code: 0; 3 if a step does not fit; 2 for an invalid command; 1 for other failures.
    """
    asked = _parser().parse_args(arguments)
    logging.basicConfig(format='%(message)s')
    logging.getLogger('scalax').setLevel(logging.INFO)
    # Nothing runs on devices, so local accelerators are not taken, not even by the user's file.
    jax.config.update('jax_platforms', 'cpu')
    try:
        fits = asked.run(asked)
    except ScalaxError as error:
        print(f'error: {error}', file=sys.stderr)
        return FAILED if isinstance(error, PlanError | MissingDependencyError) else USAGE
    return TOO_LARGE if fits is False else FITS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('python -m scalax', description='Know before you run.', epilog=_EPILOG)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    plan = _command(commands, 'plan', 'memory, communication and time of a step', _PLAN)
    plan.add_argument('function', metavar='FILE.py:make_step', help='the function that makes the step')
    _add_mesh(plan)
    plan.add_argument(
        '--quick',
        action='store_true',
        help='seconds instead of minutes: makes no code; memory is that of the layout',
    )
    plan.add_argument('--json', action='store_true', help='print the plan as JSON: Plan.load reads it')
    plan.add_argument('--html', type=_page, metavar='OUT.html', help='also write the plan as a page')
    plan.set_defaults(run=_commands.plan)

    search = _command(commands, 'search', 'the best mesh for a step', _SEARCH)
    search.add_argument('function', metavar='FILE.py:make_step', help='the function that makes the step')
    search.add_argument('--topology', required=True, help=_TOPOLOGY)
    search.add_argument('--axes', required=True, metavar='NAME,NAME,...', help='the mesh axes: fsdp,tp')
    _add_sizes(search)
    search.add_argument('--slices', type=_positive, default=1, metavar='N', help='how many slices')
    search.add_argument('--dcn', metavar='NAME', help='the mesh axis that runs from slice to slice')
    how = search.add_mutually_exclusive_group()
    how.add_argument('--quick', action='store_true', help='no full plans, not even where one would decide')
    how.add_argument(
        '--full', type=_number, default=None, metavar='N', help='how many of the best to compile in full'
    )
    search.add_argument(
        '--file',
        type=_page,
        metavar='TRIALS.jsonl',
        help='where plans are kept: a search goes on from there',
    )
    search.add_argument(
        '--html', type=_page, metavar='OUT.html', help='also write all meshes and their plans as a page'
    )
    search.add_argument('--json', action='store_true', help='print the result as JSON')
    search.set_defaults(run=_commands.search)

    find = _command(commands, 'find', 'a mesh and a rule for a step of one device', _FIND)
    find.add_argument('function', metavar='FILE.py:make_step', help='the function that makes the step')
    find.add_argument('--topology', required=True, help=_TOPOLOGY)
    find.add_argument(
        '--batch',
        required=True,
        type=_positions,
        metavar='N,...',
        help='the arguments that hold rows of a batch, by position from 0',
    )
    find.add_argument(
        '--donate', type=_positions, default=(), metavar='N,...', help='the arguments that may be overwritten'
    )
    _add_sizes(find)
    find.add_argument('--slices', type=_positive, default=1, metavar='N', help='how many slices')
    find.add_argument(
        '--budget', type=_positive, default=600, metavar='SECONDS', help='when to stop trying more (600)'
    )
    find.add_argument(
        '--file',
        type=_page,
        metavar='TRIALS.jsonl',
        help='where trials are kept: a search goes on from there',
    )
    find.add_argument('--code', action='store_true', help='print a program that uses what was found')
    find.add_argument('--json', action='store_true', help='print the result as JSON')
    find.add_argument('--html', type=_page, metavar='OUT.html', help='also write the result as a page')
    find.set_defaults(run=_commands.find)

    explain = _command(commands, 'explain', 'the sharding of each leaf, and why', _EXPLAIN)
    explain.add_argument(
        'function', metavar='FILE.py:make_state', help='the function that makes the tree and its rules'
    )
    _add_mesh(explain)
    explain.add_argument('--json', action='store_true', help='print the report as JSON')
    explain.set_defaults(run=_commands.explain)

    topologies = _command(commands, 'topologies', 'the known TPU slices', 'TPU slices, and their chips.')
    topologies.set_defaults(run=_commands.topologies)
    return parser


def _command(commands: Any, name: str, summary: str, text: str) -> argparse.ArgumentParser:
    """Adds a command to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=text,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--sizes',
        action='append',
        default=[],
        type=_choice,
        metavar='NAME=N,N,...',
        help='the sizes that an axis may have: tp=1,2,4; once for each axis',
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--topology', help=f'{_TOPOLOGY}; without it: simulated CPU devices')
    parser.add_argument(
        '--mesh',
        required=True,
        type=_sizes,
        metavar='NAME=N,...',
        help='mesh axes; one may be -1: fsdp=-1,tp=4',
    )
    parser.add_argument('--slices', type=_positive, default=None, metavar='N', help='how many slices')
    parser.add_argument(
        '--dcn',
        type=_sizes,
        default={},
        metavar='NAME=N,...',
        help='the number of slices along mesh axes: data=4; an axis that --mesh does not name has that size',
    )


def _sizes(text: str) -> dict[str, int]:
    """``'fsdp=-1,tp=4'`` as names and sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(','):
        name, _, size = (piece.strip() for piece in part.partition('='))
        if not name or not re.fullmatch(r'-1|0*[1-9][0-9]*', size):
            raise argparse.ArgumentTypeError(
                f'{text!r} is not of the form NAME=N,NAME=N (as in fsdp=-1,tp=4)'
            )
        if name in sizes:
            raise argparse.ArgumentTypeError(f'{text!r} names {name!r} twice')
        sizes[name] = -1 if size == '-1' else _number(size)
    return sizes


def _choice(text: str) -> tuple[str, tuple[int, ...]]:
    """``'tp=1,2,4'`` as a name and sizes."""
    name, _, sizes = text.partition('=')
    if not name.strip() or not all(size.strip().isdecimal() for size in sizes.split(',')):
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form NAME=N,N,... (as in tp=1,2,4)')
    return name.strip(), tuple(map(_positive, sizes.split(',')))


def _number(text: str, least: int = 0) -> int:
    """A whole number that is not absurdly large."""
    digits = text.strip()[:_LONGEST]
    if not digits.isdecimal() or int(digits) < least:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number of at least {least}')
    if int(digits) > _MOST:
        raise argparse.ArgumentTypeError(f'{digits} is more than {_MOST:,}')
    return int(digits)


def _positions(text: str) -> tuple[int, ...]:
    """``'1,2'`` as positions of arguments."""
    return tuple(map(_number, text.split(',')))


_positive = functools.partial(_number, least=1)


def _page(text: str) -> Path:
    """The path of a file that can be written; checked here, before minutes of compiling."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f'{text!r} cannot be written: it is a folder, or its parent directory does not exist'
        )
    return path
