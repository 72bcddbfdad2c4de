"""How do the arguments and results of a program lie that was lowered but not compiled? As its types say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

_SHARDING = re.compile(r'#sdy\.sharding<@\w+, \[(.*?)\](?:, replicated=\{[^}]*\})?>')
_DIMENSION = re.compile(r'\{([^}]*)\}')
_AXES = re.compile(r'(?:"[^"]+"(?:, )?)*$')


def lowered_shardings(
    lowered: Any, names: Sequence[str], mesh: Mesh
) -> tuple[list[NamedSharding | None], list[NamedSharding | None]]:
    """The shardings of arguments and results; None for those that are the compiler's to choose.

    Args:
        lowered: a ``jax.stages.Lowered``.
        names: what the traced program calls its arguments, those included that nothing uses.
        mesh: the mesh of the program.
    """
    for operation in lowered.compiler_ir().body.operations:
        if str(operation.attributes['sym_name']) == '"main"':
            arguments = [_argument_name(argument) for argument in operation.arguments]
            known = dict(zip(arguments, _all(operation.attributes['arg_attrs'], mesh), strict=True))
            return [known.get(name) for name in names], list(_all(operation.attributes['res_attrs'], mesh))
    return [None] * len(names), []


def _argument_name(argument: Any) -> str:
    """``loc("params['w']")`` -> ``params['w']``."""
    return str(argument.location)[len('loc("') : -len('")')]


def _all(attributes: Iterable[Any], mesh: Mesh) -> Iterable[NamedSharding | None]:
    for attribute in attributes:
        spec = written_spec(str(attribute))
        yield None if spec is None else NamedSharding(mesh, spec)


def written_spec(text: str) -> PartitionSpec | None:
    """The spec among the attributes of an argument; None where there is none, or the compiler may add to it.

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
    if not all(_AXES.match(dimension) for dimension in dimensions):
        return None
    entries = [tuple(re.findall(r'"([^"]+)"', dimension)) for dimension in dimensions]
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))
