"""Modules and named scopes of a program: where in the user's model each instruction belongs.

JAX writes named scopes, which flax, haiku and equinox open for each module, into the name of an operation,
between the transformations and the primitive: ``jit(step)/transpose(jvp(Model))/layers_0/up/dot_general``.
Forward, backward and recomputed operations of one module have the same scope. Code without any scope is told
apart by the functions that call each other: ``step()/loss()/attention()``. So are the layers of equinox, as
their scopes do not say where they are: ``step()/loss()/Block()/eqx.nn.Linear``.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence

from scalax._compile import sjit
from scalax._core.util.user_frames import user_call_path
from scalax._planning.program.counting import Phase
from scalax._planning.program.hlo import Module
from scalax._spmd.pipelines.summary import PIPELINE_SCOPE
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE

_WRAPPED = re.compile(r'(jvp|transpose|vmap|pmap|jit|pjit|annotation)\((.*)\)', re.DOTALL)
_TRANSFORMS = ('jvp', 'transpose', 'vmap', 'pmap')
# What JAX itself puts into names: calls of jaxprs, and the parts of loops and branches.
_CALLS = {
    *('checkpoint', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call', 'eval_jaxpr'),
    *('custom_vjp_call_jaxpr', 'pallas_call', 'remat', 'remat2', 'rematted_computation', 'shard_map'),
    'xla_metadata_call',
}
_PARTS_OF = {'while': re.compile('body|cond'), 'cond': re.compile(r'branch_\d+_fun')}
_EINSUM = '->'
# Scopes of equinox: its own layers have the name of their class, and modules of the user have none.
_UNPLACED = 'eqx.nn.'
# The packages that trace users' functions.
_TRACING = tuple(
    os.path.abspath(folder) + os.sep
    for folder in (os.path.dirname(sjit.__file__), os.path.dirname(os.path.dirname(__file__)))
)


@dataclasses.dataclass(frozen=True)
class ScopeCost:
    """The work of one device in a module or named scope, in one part of a step.

    Attributes:
        scope: the names from the outermost to the innermost, joined by slashes: ``'Model/layers_0/up'``;
            functions, ``'step()/loss()'``, where there are no scopes; empty if nothing is known.
        phase: the part of the step.
        flops: as `DeviceCost.flops`.
        bytes: as `DeviceCost.bytes`.
    """

    scope: str
    phase: Phase
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ScopeRuns:
    """How often a collective runs in a module or named scope.

    Attributes:
        scope: as `ScopeCost.scope`.
        count: how often.
    """

    scope: str
    count: int


class Scopes:
    """The scopes of the instructions of a program.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[tuple[str, int], str] = {}

    def of(self, op_name: str, frame: int) -> str:
        """The scope of an instruction; empty if nothing says it.

        Args:
            op_name: its whole op name.
            frame: the number of its stack frame.
        """
        key = op_name, frame
        if key not in self._known:
            names = scopes_in(COLLECTIVE_SCOPE.sub('', PIPELINE_SCOPE.sub('', op_name)))
            if all(name.startswith(_UNPLACED) for name in names):
                names = [*self._functions(frame), *names]
            self._known[key] = '/'.join(names)
        return self._known[key]

    def _functions(self, frame: int) -> Sequence[str]:
        frames = user_call_path(self._module.stack(frame), lambda each: each.file, _TRACING)
        return [function_name(each.function) for each in reversed(frames)]


def scopes_in(op_name: str) -> list[str]:
    """The named scopes in the name of an operation.

    Example:
        >>> scopes_in('jit(step)/transpose(jvp(Model))/while/body/checkpoint/mlp/dot_general')
        ['Model', 'mlp']
        >>> scopes_in('jit(step)/jvp()/bi,ij->bj/dot_general')
        []
    """
    *parts, _ = _split(op_name)
    names: list[str] = []
    wrapped: list[bool] = []
    for own, is_wrapped in map(_unwrapped, parts):
        before = names[-1] if names else ''
        if before in _PARTS_OF and _PARTS_OF[before].fullmatch(own):
            names.pop()
            wrapped.pop()
            continue
        # The name of a call that is transformed begins with the scopes around it, once more.
        again = names and is_wrapped and wrapped[-1] and own == before
        if own and own not in _CALLS and _EINSUM not in own and not again:
            names.append(own)
            wrapped.append(is_wrapped)
    return [part for name in names for part in name.split('/') if part]


def function_name(qualified: str) -> str:
    """A function as it is called.

    Example:
        >>> [function_name(name) for name in ('make.<locals>.step', 'Block.__call__', 'Block.attend')]
        ['step()', 'Block()', 'Block.attend()']
    """
    return f'{qualified.rpartition("<locals>.")[2].removesuffix(".__call__")}()'


def _split(op_name: str) -> Iterator[str]:
    """The parts between slashes that are not in brackets."""
    start, depth = 0, 0
    for place, char in enumerate(op_name):
        depth = max(0, depth + (char == '(') - (char == ')'))
        if char == '/' and not depth:
            yield op_name[start:place]
            start = place + 1
    yield op_name[start:]


def _unwrapped(part: str) -> tuple[str, bool]:
    """A part of a name without transformations, and whether it had some; empty for what is no scope."""
    is_wrapped = False
    while found := _WRAPPED.fullmatch(part):
        if found[1] not in _TRANSFORMS:
            return '', is_wrapped
        part, is_wrapped = found[2], True
    return part, is_wrapped
