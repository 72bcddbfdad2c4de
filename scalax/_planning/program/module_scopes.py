"""Modules and named scopes of a program: the part of the user's model that each instruction belongs to.

Flax, haiku and equinox open a named scope for each module. JAX writes it into the name of an operation, after
the transformations: ``jit(step)/transpose(jvp(Model))/layers_0/up/dot_general``. The forward, backward and
recomputed operations of one module have the same scope. For code without scopes the stack of functions is
used: ``step()/loss()/attention()``; also for the layers of equinox, whose scopes contain the class only:
``step()/loss()/Block()/eqx.nn.Linear``.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence

from scalax._compile import sjit
from scalax._core.util.user_frames import user_call_path
from scalax._planning.program.hlo import Module
from scalax._planning.program.phases import Phase
from scalax._spmd.pipelines.summary import PIPELINE_SCOPE
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE

_WRAPPED = re.compile(r'(jvp|transpose|vmap|pmap|jit|pjit|annotation)\((.*)\)', re.DOTALL)
_TRANSFORMS = ('jvp', 'transpose', 'vmap', 'pmap')
# Names of calls that JAX itself puts into op names.
_CALLS = {
    *('checkpoint', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call', 'eval_jaxpr'),
    *('custom_vjp_call_jaxpr', 'pallas_call', 'remat', 'remat2', 'rematted_computation', 'shard_map'),
    'xla_metadata_call',
}
_BODIES = {'while': re.compile('body|cond'), 'cond': re.compile(r'branch_\d+_fun')}
_EINSUM = '->'
# Equinox names the scopes of its own layers after their class, and opens none for the user's modules.
_CLASS_ONLY = 'eqx.nn.'
# The packages that trace the user's function.
_TRACING = tuple(
    os.path.abspath(folder) + os.sep
    for folder in (os.path.dirname(sjit.__file__), os.path.dirname(os.path.dirname(__file__)))
)


@dataclasses.dataclass(frozen=True)
class ScopeCost:
    """The cost of a module or named scope on one device, in one phase of a step.

    Attributes:
        scope: the names from the outermost to the innermost, joined by slashes: ``'Model/layers_0/up'``;
            functions, ``'step()/loss()'``, where there are no scopes; empty if unknown.
        phase: the phase of the step.
        flops: as `DeviceCost.flops`.
        bytes: as `DeviceCost.bytes`.
    """

    scope: str
    phase: Phase
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ScopeRuns:
    """The number of executions of a collective in a module or named scope.

    Attributes:
        scope: as `ScopeCost.scope`.
        count: the number of executions.
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
        self._cache: dict[tuple[str, int], str] = {}

    def of(self, op_name: str, frame: int) -> str:
        """Returns the scope of an instruction; empty if it is unknown.

        Args:
            op_name: its full op name.
            frame: the id of its stack frame.
        """
        key = op_name, frame
        if key not in self._cache:
            names = scopes_in(COLLECTIVE_SCOPE.sub('', PIPELINE_SCOPE.sub('', op_name)))
            if all(name.startswith(_CLASS_ONLY) for name in names):
                names = [*self._functions(frame), *names]
            self._cache[key] = '/'.join(names)
        return self._cache[key]

    def _functions(self, frame: int) -> Sequence[str]:
        frames = user_call_path(self._module.stack(frame), lambda frame: frame.file, _TRACING)
        # An operation in a shard_map that the partitioner inserts has the line of both, which is the same.
        return [function_name(call.function) for call, _ in itertools.groupby(reversed(frames))]


def scopes_in(op_name: str) -> list[str]:
    """Returns the named scopes in the name of an operation.

    Example:
        >>> scopes_in('jit(step)/transpose(jvp(Model))/while/body/checkpoint/mlp/dot_general')
        ['Model', 'mlp']
        >>> scopes_in('jit(step)/jvp()/bi,ij->bj/dot_general')
        []
    """
    *parts, _ = _split(op_name)
    names: list[str] = []
    wrapped: list[bool] = []
    for name, is_wrapped in map(_unwrapped, parts):
        outer = names[-1] if names else ''
        if outer in _BODIES and _BODIES[outer].fullmatch(name):
            names.pop()
            wrapped.pop()
            continue
        # The name of a transformed call repeats the enclosing scopes.
        is_repeated = names and is_wrapped and wrapped[-1] and name == outer
        if name and name not in _CALLS and _EINSUM not in name and not is_repeated:
            names.append(name)
            wrapped.append(is_wrapped)
    return [scope for name in names for scope in name.split('/') if scope]


def function_name(qualified: str) -> str:
    """Returns the name of a function as in a call.

    Example:
        >>> [function_name(name) for name in ('make.<locals>.step', 'Block.__call__', 'Block.attend')]
        ['step()', 'Block()', 'Block.attend()']
    """
    return f'{qualified.rpartition("<locals>.")[2].removesuffix(".__call__")}()'


def _split(op_name: str) -> Iterator[str]:
    """Yields the parts between slashes outside parentheses."""
    start, depth = 0, 0
    for index, char in enumerate(op_name):
        depth = max(0, depth + (char == '(') - (char == ')'))
        if char == '/' and not depth:
            yield op_name[start:index]
            start = index + 1
    yield op_name[start:]


def _unwrapped(part: str) -> tuple[str, bool]:
    """Returns a part of a name without transformations, and whether it had any; '' if it is not a scope."""
    is_wrapped = False
    while match := _WRAPPED.fullmatch(part):
        if match[1] not in _TRANSFORMS:
            return '', is_wrapped
        part, is_wrapped = match[2], True
    return part, is_wrapped
