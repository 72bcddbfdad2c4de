"""What lowered programs say, as MLIR writes it: the arrays of arguments and results, and the whole text."""

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
        name: the name that an argument has in the traced program; that of a result is empty.
        spec: its spec; None if nothing is said, or the compiler may add to it.
        bits: what it takes on devices: nothing in the memory of the host, or if it only orders effects.
    """

    name: str
    spec: PartitionSpec | None
    bits: int


def arguments_of(lowered: Any) -> list[LoweredArray]:
    """The arguments that a program uses.

    Relies on the function ``main``, on locations being written ``loc("params['w']")``, and on *arg_attrs*.
    """
    main = _main(lowered)
    names = [_unescaped(str(argument.location)[len('loc("') : -len('")')]) for argument in main.arguments]
    return _arrays(names, [argument.type for argument in main.arguments], main.attributes['arg_attrs'])


def results_of(lowered: Any) -> list[LoweredArray]:
    """The results of a program. Relies on the function ``main``, and on *res_attrs*."""
    main = _main(lowered)
    return _arrays(itertools.repeat(''), main.type.results, main.attributes['res_attrs'])


def text_of(lowered: Any) -> str:
    """Returns a lowered program with the names of its operations, but without the lines of their files.

    Nor does the text name the functions that called the traced one. Relies on ``#loc`` beginning everything
    that tells where code is.
    """
    # The text of all constants may be far larger than the program.
    text = lowered.compiler_ir().operation.get_asm(
        large_elements_limit=_LARGEST_CONSTANT, enable_debug_info=True
    )
    lines = {*_LINE_OF_FILE.findall(text)}
    names = {name for name, place in _NAMED.findall(text) if place not in lines}
    return '\n'.join([_LOCATIONS.sub('', text), *sorted(names)])


def _main(lowered: Any) -> Any:
    operations = lowered.compiler_ir().body.operations
    [main] = [each for each in operations if str(each.attributes['sym_name']) == '"main"']
    return main


def _arrays(names: Iterable[str], types: Iterable[Any], attributes: Iterable[Any]) -> list[LoweredArray]:
    pairs = zip(map(str, types), map(str, attributes), strict=True)
    return [
        LoweredArray(name, written_spec(text), 0 if _ON_HOST.search(text) else _bits(kind))
        for name, (kind, text) in zip(names, pairs, strict=False)
    ]


def _bits(kind: str) -> int:
    """The bits of an array. A bool takes a byte; what is no array orders effects."""
    found = _ARRAY.match(kind)
    if found is None:
        return 0
    sizes, is_complex, width = found.groups()
    bits = 8 if width == '1' else int(width) * (2 if is_complex else 1)
    return math.prod(map(int, sizes.split('x')[:-1])) * bits


def written_spec(text: str) -> PartitionSpec | None:
    """The spec in the attributes of an argument; None if there is none, or the compiler may add to it.

    Relies on how Shardy writes it.

    Example:
        >>> written_spec('{sdy.sharding = #sdy.sharding<@mesh, [{}, {"data", "model"}]>}')
        P(None, ('data', 'model'))
        >>> written_spec('{sdy.sharding = #sdy.sharding<@mesh, [{"data", ?}]>}') is None
        True
    """
    found = _SHARDING.search(text)
    if found is None:
        return None
    dimensions = _DIMENSION.findall(found[1])
    if not all(_CLOSED_AXES.match(dimension) for dimension in dimensions):
        return None
    entries = [tuple(map(_unescaped, re.findall(r'"([^"]+)"', dimension))) for dimension in dimensions]
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def _unescaped(text: str) -> str:
    r"""Quoted text as MLIR writes it: a quotation mark is ``\22``, a backslash is ``\\``."""
    digits = re.compile(rb'\\(\\|[0-9A-F]{2})')
    return digits.sub(
        lambda found: bytes.fromhex(found[1].decode().replace('\\', '5C')), text.encode()
    ).decode()
