"""Lowered programs in MLIR: the arrays of their arguments and results, and their text."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

# Names of axes are quoted, and may have brackets.
_SHARDING = re.compile(r'#sdy\.sharding<@\w+, \[((?:"[^"]*"|[^"\]])*)\](?:, replicated=\{.*?\})?>')
_DIMENSION = re.compile(r'\{((?:"[^"]*"|[^"}])*)\}')
_ARRAY = re.compile(r'tensor<((?:\d+x)*)(complex<)?[a-z]+(\d+)')
_ON_HOST = re.compile(r'memory_kind = "\w*host"')
_CLOSED_AXES = re.compile(r'(?:"[^"]+"(?:, )?)*$')
_LINE_OF_FILE = re.compile(r'^(#loc\d*) = loc\("[^"\n]*":\d', re.MULTILINE)
_NAMED = re.compile(r'^#loc\d* = loc\("(.*)"\((#loc\d*)\)\)$', re.MULTILINE)
_LOCATIONS = re.compile(r'^#loc.*\n|#loc\d*', re.MULTILINE)
_LARGEST_CONSTANT = 16  # elements; the values of a larger one do not change a plan


class LoweredArray(NamedTuple):
    """An argument or a result of a lowered program.

    Attributes:
        name: the name of an argument in the traced program; empty for a result.
        spec: its spec; None if it is unspecified, or the compiler may add to it.
        bits: its size on devices; 0 if it is in host memory, or only orders effects.
    """

    name: str
    spec: PartitionSpec | None
    bits: int


def arguments_of(lowered: Any) -> list[LoweredArray]:
    """Returns the arguments that a program uses.

    Relies on the function ``main``, on locations being written ``loc("params['w']")``, and on *arg_attrs*.
    """
    main = _main(lowered)
    names = [_unescaped(str(argument.location)[len('loc("') : -len('")')]) for argument in main.arguments]
    return _arrays(names, [argument.type for argument in main.arguments], main.attributes['arg_attrs'])


def results_of(lowered: Any) -> list[LoweredArray]:
    """Returns the results of a program. Relies on the function ``main``, and on *res_attrs*."""
    main = _main(lowered)
    return _arrays(itertools.repeat(''), main.type.results, main.attributes['res_attrs'])


def text_of(lowered: Any) -> str:
    """Returns the text of a lowered program with the names of its operations, but without source lines.

    The text does not name the callers of the traced function, either. Relies on ``#loc`` beginning every
    source location.
    """
    # The text of all constants may be far larger than the program.
    text = lowered.compiler_ir().operation.get_asm(
        large_elements_limit=_LARGEST_CONSTANT, enable_debug_info=True
    )
    lines = {*_LINE_OF_FILE.findall(text)}
    names = {name for name, location in _NAMED.findall(text) if location not in lines}
    return '\n'.join([_LOCATIONS.sub('', text), *sorted(names)])


def _main(lowered: Any) -> Any:
    operations = lowered.compiler_ir().body.operations
    [main] = [op for op in operations if str(op.attributes['sym_name']) == '"main"']
    return main


def _arrays(names: Iterable[str], types: Iterable[Any], attributes: Iterable[Any]) -> list[LoweredArray]:
    pairs = zip(map(str, types), map(str, attributes), strict=True)
    return [
        LoweredArray(name, written_spec(text), 0 if _ON_HOST.search(text) else _bits(kind))
        for name, (kind, text) in zip(names, pairs, strict=False)
    ]


def _bits(kind: str) -> int:
    """Returns the bits of an array. A bool has a byte; a value that is not an array orders effects."""
    match = _ARRAY.match(kind)
    if match is None:
        return 0
    sizes, is_complex, width = match.groups()
    bits = 8 if width == '1' else int(width) * (2 if is_complex else 1)
    return math.prod(map(int, sizes.split('x')[:-1])) * bits


def written_spec(text: str) -> PartitionSpec | None:
    """Returns the spec in the attributes of an argument; None if it has none, or the compiler may add to it.

    Relies on how Shardy writes it.

    Example:
        >>> written_spec('{sdy.sharding = #sdy.sharding<@mesh, [{}, {"data", "model"}]>}')
        P(None, ('data', 'model'))
        >>> written_spec('{sdy.sharding = #sdy.sharding<@mesh, [{"data", ?}]>}') is None
        True
    """
    match = _SHARDING.search(text)
    if match is None:
        return None
    dimensions = _DIMENSION.findall(match[1])
    if not all(_CLOSED_AXES.match(dimension) for dimension in dimensions):
        return None
    entries = [tuple(map(_unescaped, re.findall(r'"([^"]+)"', dimension))) for dimension in dimensions]
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def _unescaped(text: str) -> str:
    r"""Returns quoted MLIR text without escapes: a quotation mark is ``\22``, a backslash is ``\\``."""
    digits = re.compile(rb'\\(\\|[0-9A-F]{2})')
    return digits.sub(
        lambda match: bytes.fromhex(match[1].decode().replace('\\', '5C')), text.encode()
    ).decode()
