"""Matching of the results of a step to its state: updated weights, updated moments, and gradients.

Updated state is computed from the old state by elementwise operations, as in ``w - rate * gradient``. A
gradient that a step returns is not; it is matched by its path, which ends like the path of its weight.
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
"""The indices of the arguments from which elementwise operations compute a value, with the distance to each.

The distance is the number of operations that scale or otherwise change the argument, not counting sums.
"""

# Sums, selections and casts leave state as it is. Other operations scale it, or compute something else.
_PRESERVES_STATE = frozenset(
    ('add', 'add_any', 'convert_element_type', 'copy', 'name', 'select_n', 'stop_gradient', 'sub')
)
# These write into their first operand.
_WRITES_INTO_FIRST = frozenset(('dynamic_update_slice', 'scatter', 'scatter-add'))
_MAX_DISTANCE = 16


class ResultState(NamedTuple):
    """The state that a result is, or whose gradient it is.

    Attributes:
        arguments: the indices of the arguments that may be that state: one, or several of equal shape.
        distance: the number of operations between the state and the result that scale it.
    """

    arguments: tuple[int, ...] = ()
    distance: int = 0


def result_states(jaxpr: Any, paths: Sequence[str | None], results: Sequence[str]) -> list[ResultState]:
    """Returns the state that each result of a step is.

    Args:
        jaxpr: the jaxpr of the step, open or closed.
        paths: the leaf paths of its arguments; None for arguments that are not state.
        results: the leaf paths of its results.
    """
    inner_jaxpr = open_jaxpr(jaxpr)
    keys = [None if path is None else (*path.split('/'),) for path in paths]
    by_type = dict[Any, dict[int, None]]()
    for i, (var, path) in enumerate(zip(inner_jaxpr.invars, keys, strict=True)):
        if path is not None:
            by_type.setdefault(_type(var), {})[i] = None
    distances = _Distances()
    result_distances = distances.eval_jaxpr(
        jaxpr, [() if path is None else ((i, 0),) for i, path in enumerate(paths)]
    )
    uses = {id(atom) for equation in inner_jaxpr.eqns for atom in equation.invars}
    states, candidates, computed = [ResultState()] * len(results), dict[int, list[int]](), set[int]()
    for n, (var, sources) in enumerate(zip(inner_jaxpr.outvars, result_distances, strict=True)):
        same_type = by_type.get(_type(var), {})
        near_distances = {i: distance for i, distance in sources if i in same_type}
        distance = min(near_distances.values(), default=0)
        nearest = [i for i in near_distances if near_distances[i] == distance]
        if not near_distances:
            nearest = [i for i in same_type if id(inner_jaxpr.invars[i]) in uses]
        if len(nearest) == 1 and near_distances and (shape_of(var) or not distance):
            states[n] = ResultState((nearest[0],), distance)
        elif nearest:
            states[n], candidates[n] = ResultState((), distance), nearest
            if near_distances:
                computed.add(n)
    root_pairs = {
        n: {i: _common_suffix_roots((*results[n].split('/'),), keys[i] or ()) for i in x}
        for n, x in candidates.items()
    }
    # Where several arguments are possible, the pair of trees in which most paths match decides.
    votes = Counter[Any](pair for pairs in root_pairs.values() for pair in pairs.values() if pair is not None)
    for n, pairs in root_pairs.items():
        var, most = inner_jaxpr.outvars[n], max(votes[pair] for pair in pairs.values())
        # Without a matching path, scalars and values from outside of a backward pass do not count as state.
        if most or (shape_of(var) and (n in computed or _is_from_backward(inner_jaxpr, var))):
            states[n] = states[n]._replace(arguments=tuple([i for i in pairs if votes[pairs[i]] == most]))
    return states


def _common_suffix_roots(result: Sequence[str], argument: Sequence[str]) -> tuple[Any, Any] | None:
    """Returns the two prefixes after which the paths of a result and an argument are equal.

    These are the paths of the trees in which both leaves have the same path. Returns None if there are none.
    """
    count = 0
    for a, b in zip(reversed(result), reversed(argument), strict=False):
        if a != b:
            break
        count += 1
    return (result[:-count], argument[:-count]) if count else None


class _Distances(AbstractInterpreter[Distances]):
    """Computes the distances of the values of a jaxpr to its arguments."""

    def __init__(self) -> None:
        super().__init__(bottom=())
        self._joined: dict[tuple[Distances, ...], Distances] = {}
        self._farther: dict[Distances, Distances] = {}

    def _eval_equations(self, jaxpr: Any, arguments: Sequence[Distances]) -> list[Distances]:
        distances_by_id = {
            id(var): distances for var, distances in zip(jaxpr.invars, arguments, strict=True) if distances
        }
        for equation in jaxpr.eqns:
            name = primitive_name(equation)
            if name in ELEMENTWISE and len(equation.outvars) == 1:  # a fast path for most equations
                result = self._elementwise(name, equation, distances_by_id)
                if result:
                    distances_by_id[id(equation.outvars[0])] = result
                continue
            operands = [distances_by_id.get(id(atom), ()) for atom in equation.invars]
            if any(operands):
                results = self.eval_equation(equation, operands)
                pairs = zip(equation.outvars, results, strict=False)
                distances_by_id.update({id(var): distances for var, distances in pairs if distances})
        self.record(distances_by_id)
        return [distances_by_id.get(id(atom), ()) for atom in jaxpr.outvars]

    def _elementwise(self, name: str, equation: Any, distances_by_id: Mapping[int, Distances]) -> Distances:
        """Returns the distances of the result of an elementwise equation, from operands of its shape."""
        shape: tuple[int, ...] | None = None
        result: Distances = ()
        for i, atom in enumerate(equation.invars):
            distances = distances_by_id.get(id(atom))
            if distances is None:
                continue
            if shape is None:
                shape = shape_of(equation.outvars[0])
            if shape_of(atom) == shape:
                if name not in _PRESERVES_STATE or (name == 'sub' and i == 1):
                    distances = self._scaled(distances)
                result = self.join((result, distances)) if result and result != distances else distances
        return result

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[Distances]) -> Sequence[Distances]:
        if name in SHARDING_PARAMS or name == 'optimization_barrier':
            return operands
        return operands[:1] if name in _WRITES_INTO_FIRST else ()

    def _scaled(self, distances: Distances) -> Distances:
        """Returns the distances of a value after one more scaling operation."""
        if distances not in self._farther:
            self._farther[distances] = tuple([(n, min(x + 1, _MAX_DISTANCE)) for n, x in distances])
        return self._farther[distances]

    def join(self, facts: Sequence[Distances]) -> Distances:
        if (key := tuple(facts)) not in self._joined:
            least: dict[int, int] = {}
            for distances in facts:
                for i, distance in distances:
                    least[i] = min(distance, least.get(i, distance))
            self._joined[key] = tuple(sorted(least.items()))
        return self._joined[key]


def _type(var: Any) -> Any:
    return shape_of(var), var.aval.dtype


def _is_from_backward(jaxpr: Any, var: Any) -> bool:
    """Whether an equation of a backward pass, possibly in an inner call, computes a result of a jaxpr."""
    for equation in reversed(jaxpr.eqns):
        for i, result in enumerate(equation.outvars):
            if result is var:
                if is_backward(equation) or primitive_name(equation) not in CALLS:
                    return is_backward(equation)
                inner = open_jaxpr(call_jaxpr(equation))
                return _is_from_backward(inner, inner.outvars[i])
    return False
