"""What does a command line ask for? Parsed, answered, and turned into an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from scalax.cli import _commands
from scalax.errors import MissingDependencyError, PlanError, ScalaxError

FITS, FAILED, USAGE, TOO_LARGE = 0, 1, 2, 3

_EPILOG = """\
exit codes: 0 it fits, 3 it does not, 2 the command asks for what cannot be, 1 anything else
"""
_PLAN = """\
Compiles a step for a mesh, without running it: what does each device hold, what do the devices
send one another, and what bounds the step?

FILE.py:make_step names a function of a file. It is called with a MeshShardingHelper, and returns
the step (such as helper.sjit makes) and the tuple of its arguments; jax.ShapeDtypeStruct will do.
"""
_EXPLAIN = """\
What does each leaf get, and which rule says so? Nothing is compiled.

FILE.py:make_state names a function of a file. It is called with a MeshShardingHelper, and returns
a tree (jax.ShapeDtypeStruct leaves will do) and the rules for it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers a command line.

    Args:
        arguments: those of the process by default.

    Returns:
        The exit code: 0; 3 if a step does not fit; 2 for what cannot be asked; 1 for other failures.
    """
    asked = _parser().parse_args(arguments)
    try:
        fits = asked.answer(asked)
    except (PlanError, MissingDependencyError) as error:
        return _failed(error, FAILED)
    except ScalaxError as error:
        return _failed(error, USAGE)
    return TOO_LARGE if fits is False else FITS


def _failed(error: ScalaxError, code: int) -> int:
    print(f'error: {error}', file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('python -m scalax', description='Know before you run.', epilog=_EPILOG)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    plan = _command(commands.add_parser, 'plan', 'what a step holds, sends and takes', _PLAN)
    plan.add_argument('function', metavar='FILE.py:make_step', help='what makes the step')
    _add_mesh(plan)
    plan.add_argument('--quick', action='store_true', help='take seconds, and let memory be approximate')
    plan.add_argument('--json', action='store_true', help='print the plan as JSON: Plan.load reads it')
    plan.set_defaults(answer=_commands.plan)

    explain = _command(commands.add_parser, 'explain', 'which sharding each leaf gets, and why', _EXPLAIN)
    explain.add_argument('function', metavar='FILE.py:make_state', help='what makes the tree and its rules')
    _add_mesh(explain)
    explain.add_argument('--json', action='store_true', help='print the report as JSON')
    explain.set_defaults(answer=_commands.explain)

    topologies = _command(
        commands.add_parser, 'topologies', 'which TPU slices are known', 'TPU slices, and their chips.'
    )
    topologies.set_defaults(answer=_commands.topologies)
    return parser


def _command(
    add: Callable[..., argparse.ArgumentParser], name: str, help_: str, text: str
) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    return add(name, help=help_, description=text, epilog=_EPILOG, formatter_class=layout)


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--topology', help='the TPU slice, such as v5p:4x4x4; without it: simulated CPU devices'
    )
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
        help='how many slices lie along which axes: data=4',
    )
    parser.add_argument(
        '--split', action='store_true', help='let one axis of the torus serve several mesh axes'
    )


def _sizes(text: str) -> dict[str, int]:
    """``'fsdp=-1,tp=4'`` as names and sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(','):
        name, _, size = part.partition('=')
        if not name.strip() or not size.strip().lstrip('-').isdigit():
            raise argparse.ArgumentTypeError(
                f'{text!r} is not of the form NAME=N,NAME=N (as in fsdp=-1,tp=4)'
            )
        if name.strip() in sizes:
            raise argparse.ArgumentTypeError(f'{text!r} names {name.strip()!r} twice')
        sizes[name.strip()] = int(size)
    return sizes


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is no positive number')
    return int(text)
