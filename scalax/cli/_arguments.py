"""Parser of the command line, which runs the commands and returns their exit codes."""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._core.render.tables import parse_bytes
from scalax._version import __version__
from scalax.cli import _commands
from scalax.cli._compiler_process import run_in_compiler_process
from scalax.cli._exit_codes import ExitCode
from scalax.errors import MissingDependencyError, PlanError, ScalaxError

_SPEC_ENTRY = re.compile(r'-|\w+(\+\w+)*')

_COMPILING_COMMANDS = (_commands.plan, _commands.search, _commands.autoshard, _commands.verify)
_TOPOLOGY = 'the TPU slice, such as v5p:4x4x4, or the GPUs, such as h100:4x8'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, in this process.

    Args:
        arguments: the arguments; those of the process by default.

    Returns:
        The exit code, an `ExitCode`.
    """
    return _run(vars(_parser().parse_args(arguments)))


def main_process() -> int:
    """Runs the command line of this process. Commands that compile run in another process.

    Returns:
        The exit code, an `ExitCode`.
    """
    options = vars(_parser().parse_args())
    code = None
    if options['run'] in _COMPILING_COMMANDS:
        code = run_in_compiler_process(options['function'], options['topology'])
    return _run(options) if code is None else code


def _run(options: dict[str, Any]) -> int:
    run = options.pop('run')
    logging.basicConfig(format='%(message)s')
    # Nothing runs on devices, so local accelerators stay free, even if the user's file initializes JAX.
    jax.config.update('jax_platforms', 'cpu')
    try:
        code: ExitCode = run(**options)
    except ScalaxError as error:
        print('\n'.join([f'error: {error}', *getattr(error, '__notes__', [])]), file=sys.stderr)
        is_failure = isinstance(error, PlanError | MissingDependencyError)
        return ExitCode.FAILED if is_failure else ExitCode.INVALID
    return code


def _parser() -> argparse.ArgumentParser:
    """Makes the parser. Each option has the name of the parameter of its command."""
    format_options: dict[str, Any] = {
        'epilog': '\n'.join(['exit codes:', *(f'  {code:<3}  {code.meaning}' for code in ExitCode)]),
        'formatter_class': argparse.RawDescriptionHelpFormatter,
    }
    name = 'scalax' if Path(sys.argv[0]).stem == 'scalax' else 'python -m scalax'
    parser = argparse.ArgumentParser(name, description='Know before you run.', **format_options)
    versions = f'scalax {__version__}, JAX {jax.__version__}, Python {sys.version.split()[0]}'
    parser.add_argument('--version', action='version', version=versions)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    def command(run: Callable[..., ExitCode], summary: str) -> argparse.ArgumentParser:
        subparser: argparse.ArgumentParser = commands.add_parser(
            run.__name__, help=summary, description=inspect.getdoc(run), **format_options
        )
        subparser.set_defaults(run=run)
        _flag(subparser, 'json', 'print the result as JSON', dest='as_json')
        return subparser

    plan = command(_commands.plan, 'memory, communication and time of a step')
    _add_step(plan)
    _add_mesh(plan)
    _add_page(plan)
    _flag(plan, 'quick', 'takes seconds instead of minutes: generates no code, and estimates memory')

    search = command(_commands.search, 'the best mesh for a step')
    _add_step(search)
    _option(search, 'axes', 'NAME,NAME,...', 'the mesh axes: fsdp,tp', required=True)
    _add_search(search)
    _add_page(search)
    dcn = 'the mesh axes across slices: slices are distributed over them in order, as far as sizes allow'
    _option(search, 'dcn', 'NAME,...', dcn, _names, dest='dcn_axis')
    pipeline = (
        'the stage axis of a pipeline, and numbers of microbatches: stage=8,16,32; make_step then also takes '
        'pipeline='
    )
    _option(search, 'pipeline', 'NAME=N,N,...', pipeline, _choice)
    how = search.add_mutually_exclusive_group()
    quick = 'make no full plans, even if one would decide'
    how.add_argument('--quick', action='store_const', const=0, dest='full', help=quick)
    _option(how, 'full', 'N', 'how many of the best meshes to compile in full', _number)

    autoshard = command(_commands.autoshard, 'a mesh and a rule for a step for one device')
    _add_step(autoshard)
    batch = 'the arguments that hold a batch, by position from 0'
    _option(autoshard, 'batch', 'N,...', batch, _argnums, dest='batch_argnums', required=True)
    donate = 'the arguments that may be overwritten'
    _option(autoshard, 'donate', 'N,...', donate, _argnums, (), dest='donate_argnums')
    _option(autoshard, 'batch-dim', 'N', 'the batch dimension, from 0 (0)', _number, 0)
    _add_search(autoshard)
    _add_page(autoshard)
    keep = (
        'a fixed sharding of leaves, with an entry for each dimension: embed=fsdp,- or norm= (replicated) or '
        'head=-,fsdp+tp; may be repeated'
    )
    _option(autoshard, 'keep', 'REGEX=SPEC', keep, _fixed_spec, [], action='append')
    _option(
        autoshard,
        'memory',
        'SIZE',
        'the memory of a device, instead of that of the hardware: 16GiB, 80GB',
        _bytes,
    )
    _option(autoshard, 'headroom', 'FRACTION', 'the fraction of the memory to leave free (0.1)', float, 0.1)
    _flag(
        autoshard,
        'zero1',
        'shard only optimizer states over the axes of the batch, not parameters',
    )
    _option(
        autoshard, 'budget', 'SECONDS', 'when to stop trying layouts (600)', _positive, 600, dest='budget_s'
    )
    _flag(autoshard, 'code', 'print a program that uses the mesh and the rule')

    verify = command(_commands.verify, 'whether a step gives the same results on a mesh as on one device')
    _add_step(verify)
    _add_mesh(verify)
    _add_page(verify)
    config = (
        'the name of the configuration in FILE.py, the second argument of make_step, whose sizes may be '
        'reduced; by default the default of the parameter'
    )
    _option(verify, 'config', 'NAME', config, default='')
    _option(verify, 'seeds', 'N', 'the number of sets of arguments (3)', _positive, 3)
    _option(verify, 'steps', 'N', 'the number of consecutive steps (2)', _positive, 2)
    _removed(verify, 'python', 'start verify with the other interpreter: PATH -m scalax verify')
    _flag(verify, 'compare-intermediates', 'also compare intermediate values, if no result differs')
    devices = 'how many CPU devices to simulate; a step for more is downscaled (8)'
    _option(verify, 'devices', 'N', devices, _positive, 8)

    explain = command(_commands.explain, 'the sharding of each leaf, and why')
    makes = 'the function that makes the tree and its rules'
    explain.add_argument('function', metavar='FILE.py:make_state', help=makes)
    _add_mesh(explain)
    _add_page(explain)

    command(_commands.topologies, 'the known slices and GPUs')

    doctor = command(_commands.doctor, 'what is wrong with this installation, and how to fix it')
    run = 'ask a running program what each process does: the address of its coordinator, process 0'
    _option(doctor, 'run', 'HOST:PORT', run, dest='address')
    _removed(doctor, 'verify', 'compare a step of yours: scalax verify FILE.py:make_step')
    _option(doctor, 'timeout', 'SECONDS', 'how long opening the devices may take (120)', _positive, 120)
    return parser


def _option(
    parser: Any, name: str, value: str, about: str, parse: Any = str, default: Any = None, **more: Any
) -> None:
    """Adds an option, with a placeholder and a parser for its value."""
    parser.add_argument(f'--{name}', metavar=value, help=about, type=parse, default=default, **more)


def _flag(parser: Any, name: str, about: str, **more: Any) -> None:
    parser.add_argument(f'--{name}', action='store_true', help=about, **more)


class _Removed(argparse.Action):
    """An option that was removed: raises an error that names its replacement."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f'{self.option_strings[0]} was removed: {self.const}')


def _removed(parser: argparse.ArgumentParser, name: str, advice: str) -> None:
    about, default = argparse.SUPPRESS, argparse.SUPPRESS
    parser.add_argument(f'--{name}', action=_Removed, nargs='?', const=advice, default=default, help=about)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('function', metavar='FILE.py:make_step', help='the function that makes the step')


def _add_page(parser: argparse.ArgumentParser) -> None:
    _option(parser, 'html', 'OUT.html', 'also write the result as a page', _page)


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--topology', required=True, help=_TOPOLOGY)
    sizes = 'the possible sizes of an axis: tp=1,2,4; may be repeated for other axes'
    _option(parser, 'sizes', 'NAME=N,N,...', sizes, _choice, [], action='append')
    _option(parser, 'slices', 'N', 'how many slices', _positive, 1, dest='num_slices')
    file = 'append each trial to a file, and continue an earlier search from it'
    _option(parser, 'file', 'FILE', file)


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--topology', help=f'{_TOPOLOGY}; without it: simulated CPU devices')
    _option(parser, 'mesh', 'NAME=N,...', 'mesh axes; one may be -1: fsdp=-1,tp=4', _sizes, required=True)
    _option(parser, 'slices', 'N', 'how many slices', _positive)
    dcn = 'the number of slices along axes of --mesh: data=4'
    _option(parser, 'dcn', 'NAME=N,...', dcn, _sizes, {})


def _sizes(text: str) -> dict[str, int]:
    """Parses ``'fsdp=-1,tp=4'`` as axis name -> size."""
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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(',')]


def _choice(text: str) -> tuple[str, tuple[int, ...]]:
    """Parses ``'tp=1,2,4'`` as a name and sizes."""
    name, _, sizes = text.partition('=')
    if not name.strip() or not all(size.strip().isdecimal() for size in sizes.split(',')):
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form NAME=N,N,... (as in tp=1,2,4)')
    return name.strip(), tuple(map(_positive, sizes.split(',')))


def _number(text: str, least: int = 0) -> int:
    """Parses an integer of at least *least*."""
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f'{text!r} is not an integer of at least {least}')
    return int(text)


def _fixed_spec(text: str) -> tuple[str, PartitionSpec]:
    """Parses ``'embed=fsdp,-'`` as a regex and a spec."""
    pattern, equals, spec = text.rpartition('=')
    entries = [entry.strip() for entry in spec.split(',')] if spec.strip() else []
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f'{pattern!r} is not a regex: {error}') from None
    if not equals or not pattern or not all(map(_SPEC_ENTRY.fullmatch, entries)):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not of the form REGEX=SPEC (as in embed=fsdp,- or head=-,fsdp+tp)'
        )
    axes = [None if entry == '-' else tuple(entry.split('+')) for entry in entries]
    return pattern, PartitionSpec(*axes)


def _argnums(text: str) -> tuple[int, ...]:
    """Parses ``'1,2'`` as indices of arguments."""
    return tuple(map(_number, text.split(',')))


_positive = functools.partial(_number, least=1)


def _bytes(text: str) -> int:
    """Parses ``'16GiB'`` as a number of bytes."""
    size = parse_bytes(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a memory size (as in 16GiB, 80GB, or bytes)')
    return size


def _page(text: str) -> Path:
    """Parses the path of a file to write. Checks it here, before minutes of compiling."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f'{text!r} cannot be written: it is a folder, or its parent directory does not exist'
        )
    return path
