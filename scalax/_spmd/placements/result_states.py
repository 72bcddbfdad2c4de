"""The state that the results of a step are: an updated weight, a new moment, or the gradient of a weight.

Updated state is what its old value becomes by elementwise operations, as in ``w - rate * gradient``. A
gradient that a step returns is none of that: it has the path of its weight in the tree of the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scalax._jax.equations import CALLS, SHARDING_PARAMS, call_jaxpr, open_jaxpr, shape_of
from scalax._jax.manual_axes import is_backward
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.dim_rules import ELEMENTWISE

Distances = tuple[tuple[int, int], ...]
"""The arguments, by number, that elementwise operations make a value of, with the distance to each."""

# A sum, or a choice, has its state as it is. Other operations scale it, or make something else of it.
_KEEPING = frozenset(
    ('add', 'add_any', 'convert_element_type', 'copy', 'name', 'select_n', 'stop_gradient', 'sub')
)
# They write into their first operand.
_WRITING = frozenset(('dynamic_update_slice', 'scatter', 'scatter-add'))
_FARTHEST = 16


class ResultState(NamedTuple):
    """The state that a result is, or whose gradient it is.

    Attributes:
        arguments: the arguments, by number, that may be that state: one, or several that are alike.
        distance: how many operations that scale it are between it and the result.
    """

    arguments: tuple[int, ...] = ()
    distance: int = 0


def result_states(jaxpr: Any, paths: Sequence[str | None], results: Sequence[str]) -> list[ResultState]:
    """Returns the state that each result of a step is.

    Args:
        jaxpr: the jaxpr of the step, open or closed.
        paths: the paths of its arguments; None of those that are not state.
        results: the paths of its results.
    """
    inner = open_jaxpr(jaxpr)
    keys = [None if path is None else (*path.split('/'),) for path in paths]
    by_type = dict[Any, dict[int, None]]()
    for i, (var, path) in enumerate(zip(inner.invars, keys, strict=True)):
        if path is not None:
            by_type.setdefault(_type(var), {})[i] = None
    distances = _Distances()
    known = distances.results(jaxpr, [() if path is None else ((i, 0),) for i, path in enumerate(paths)])
    uses = {id(atom) for equation in inner.eqns for atom in equation.invars}
    found, pending, computed = [ResultState()] * len(results), dict[int, list[int]](), set[int]()
    for n, (var, sources) in enumerate(zip(inner.outvars, known, strict=True)):
        alike = by_type.get(_type(var), {})
        near = {i: distance for i, distance in sources if i in alike}
        distance = min(near.values(), default=0)
        nearest = [i for i in near if near[i] == distance]
        if not near:
            nearest = [i for i in alike if id(inner.invars[i]) in uses]
        if len(nearest) == 1 and near and (shape_of(var) or not distance):
            found[n] = ResultState((nearest[0],), distance)
        elif nearest:
            found[n], pending[n] = ResultState((), distance), nearest
            if near:
                computed.add(n)
    trees = {n: {i: _trees((*results[n].split('/'),), keys[i] or ()) for i in x} for n, x in pending.items()}
    votes = Counter[Any](pair for pairs in trees.values() for pair in pairs.values() if pair is not None)
    for n, pairs in trees.items():
        var, most = inner.outvars[n], max(votes[pair] for pair in pairs.values())
        # Nothing tells of a scalar, or of what no backward pass computes, that it is state.
        if most or (shape_of(var) and (n in computed or _ends_backward(inner, var))):
            found[n] = found[n]._replace(arguments=tuple([i for i in pairs if votes[pairs[i]] == most]))
    return found


def _trees(result: Sequence[str], argument: Sequence[str]) -> tuple[Any, Any] | None:
    """The trees of a result and of an argument in which both have the same path; None if there are none."""
    count = 0
    for a, b in zip(reversed(result), reversed(argument), strict=False):
        if a != b:
            break
        count += 1
    return (result[:-count], argument[:-count]) if count else None


class _Distances(AbstractInterpreter[Distances]):
    """The distances of the values of a jaxpr to its arguments."""

    def __init__(self) -> None:
        super().__init__(nothing=())
        self._joined: dict[tuple[Distances, ...], Distances] = {}
        self._farther: dict[Distances, Distances] = {}

    def _run(self, jaxpr: Any, arguments: Sequence[Distances]) -> list[Distances]:
        known = {
            id(var): distances for var, distances in zip(jaxpr.invars, arguments, strict=True) if distances
        }
        for equation in jaxpr.eqns:
            name = primitive_name(equation)
            if name in ELEMENTWISE and len(equation.outvars) == 1:  # most, which no other method has to see
                result = self._elementwise(name, equation, known)
                if result:
                    known[id(equation.outvars[0])] = result
                continue
            operands = [known.get(id(atom), ()) for atom in equation.invars]
            if any(operands):
                results = self.equation(equation, operands)
                pairs = zip(equation.outvars, results, strict=False)
                known.update({id(var): distances for var, distances in pairs if distances})
        self.note(known)
        return [known.get(id(atom), ()) for atom in jaxpr.outvars]

    def _elementwise(self, name: str, equation: Any, known: Mapping[int, Distances]) -> Distances:
        """The distances of the result of an elementwise equation, by its operands of the same shape."""
        shape: tuple[int, ...] | None = None
        result: Distances = ()
        for i, atom in enumerate(equation.invars):
            distances = known.get(id(atom))
            if distances is None:
                continue
            if shape is None:
                shape = shape_of(equation.outvars[0])
            if shape_of(atom) == shape:
                if name not in _KEEPING or (name == 'sub' and i == 1):
                    distances = self._scaled(distances)
                result = self.joined((result, distances)) if result and result != distances else distances
        return result

    def primitive(self, name: str, equation: Any, operands: Sequence[Distances]) -> Sequence[Distances]:
        if name in SHARDING_PARAMS or name == 'optimization_barrier':
            return operands
        return operands[:1] if name in _WRITING else ()

    def _scaled(self, distances: Distances) -> Distances:
        """The distances of a value that one more operation scales."""
        if distances not in self._farther:
            self._farther[distances] = tuple([(n, min(x + 1, _FARTHEST)) for n, x in distances])
        return self._farther[distances]

    def joined(self, facts: Sequence[Distances]) -> Distances:
        if (key := tuple(facts)) not in self._joined:
            least: dict[int, int] = {}
            for distances in facts:
                for i, distance in distances:
                    least[i] = min(distance, least.get(i, distance))
            self._joined[key] = tuple(sorted(least.items()))
        return self._joined[key]


def _type(var: Any) -> Any:
    return shape_of(var), var.aval.dtype


def _ends_backward(jaxpr: Any, var: Any) -> bool:
    """Whether an equation of a backward pass computes a result of a jaxpr, or of a call in it."""
    for equation in reversed(jaxpr.eqns):
        for i, result in enumerate(equation.outvars):
            if result is var:
                if is_backward(equation) or primitive_name(equation) not in CALLS:
                    return is_backward(equation)
                inner = open_jaxpr(call_jaxpr(equation))
                return _ends_backward(inner, inner.outvars[i])
    return False
