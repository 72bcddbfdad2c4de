"""Functions of a matrix in a jaxpr: equations that compute from one value, and multiply or decompose it.

Optimizers such as Muon and SOAP contain them, for example as Newton-Schulz iterations.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from scalax._jax import equations
from scalax._jax.equations import Literal, open_jaxpr, param_values, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import extract_subjaxpr, replace_jaxpr
from scalax._jaxpr.dim_rules import DECOMPOSITIONS, ELEMENTWISE, SHAPE_OPS
from scalax._jaxpr.user_shardings import SHARDING_OPS, user_shardings_of

# Values of at most this many elements are scalars, or coefficients.
_MAX_SCALAR_SIZE = 64
_COSTLY = DECOMPOSITIONS | {'dot_general'}
_CHEAP = SHAPE_OPS | ELEMENTWISE | {'reduce_sum', 'reduce_max'}
# For a stack of matrices both branches of a `cond` would run: a loop in the wrong one may not end, and its
# gradient may be NaN.
_UNSUPPORTED = SHARDING_OPS | {'cond'}


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixFunction:
    """A function of a matrix, or of a stack of matrices.

    Attributes:
        root: the variable of the matrix.
        scalars: the variables of the scalars that the function also takes.
        equations: the equations that compute the function.
        results: the variables that other equations read.
        jaxpr: the jaxpr that computes the results from the root and the scalars.
    """

    root: Any
    scalars: Sequence[Any]
    equations: Sequence[Any]
    results: Sequence[Any]
    jaxpr: Any

    @property
    def is_stack(self) -> bool:
        """Whether the first dimension of the root may be a stack of matrices."""
        shape = shape_of(self.root)
        return len(shape) > 2 and shape[0] > 1

    @property
    def kind(self) -> Any:
        """A key that is equal for functions that compute the same from equal scalars."""
        values = [value for eqn in equations.all_equations(self.jaxpr) for value in param_values(eqn)]
        consts = [id(const) for value in values for const in getattr(value, 'consts', ())]
        return shape_of(self.root), (*map(id, self.scalars),), (*consts,), str(self.jaxpr)


def find_matrix_functions(jaxpr: Any, shapes: Container[tuple[int, ...]]) -> Iterator[MatrixFunction]:
    """Yields the functions of a matrix in a jaxpr that do not depend on each other.

    Args:
        jaxpr: the jaxpr, open or closed.
        shapes: the shapes of weights. Only values of these shapes are roots.
    """
    inner = open_jaxpr(jaxpr)
    roots: dict[int, Any] = {}  # id of a value -> the only root that it is computed from
    scalars: dict[int, Any] = {}  # id of a value that is computed from scalars -> its equation
    eqns_of_root: dict[Any, list[Any]] = {}

    def add_roots(variables: Sequence[Any]) -> None:
        roots.update({id(var): var for var in variables if size_of(var) > _MAX_SCALAR_SIZE})

    last = next((i for i in reversed(range(len(inner.eqns))) if _is_costly(inner.eqns[i])), None)
    if last is None:
        return
    add_roots(inner.invars)
    for i, equation in enumerate(inner.eqns):
        operand_roots = {*map(roots.get, map(id, equation.invars))} - {None}
        if len(operand_roots) == 1:
            [root] = operand_roots
            roots.update(dict.fromkeys(map(id, equation.outvars), root))
            eqns_of_root.setdefault(root, []).append(equation)
        elif operand_roots:
            add_roots(equation.outvars)
        elif not equation.effects:
            scalars.update(dict.fromkeys(map(id, equation.outvars), equation))
        # The equations after the last costly one add no function of a matrix.
        if i == last and not any(
            shape_of(root) in shapes and any(map(_is_costly, eqns)) for root, eqns in eqns_of_root.items()
        ):
            return
    candidates = {
        root: eqns for root, eqns in eqns_of_root.items() if shape_of(root) in shapes and _is_supported(eqns)
    }
    if not candidates:
        return
    readers: dict[int, set[int]] = {id(var): {0} for var in inner.outvars}
    for equation in inner.eqns:
        for x in equation.invars:
            readers.setdefault(id(x), set()).add(id(equation))
    functions = [
        _matrix_function(jaxpr, root, eqns, roots, readers, scalars) for root, eqns in candidates.items()
    ]
    functions = [x for x in functions if equations.draws_same_under_vmap(x.jaxpr)]
    dependent = {id(var) for function in functions for var in function.results}
    function_eqns = {id(eqn) for function in functions for eqn in function.equations}
    for equation in inner.eqns:
        if id(equation) not in function_eqns:
            propagate_dependence(equation, dependent)
    yield from [
        function
        for function in functions
        if dependent.isdisjoint(map(id, [function.root, *function.scalars]))
    ]


def propagate_dependence(equation: Any, dependent: set[int]) -> bool:
    """Returns whether an equation reads a dependent variable, and then adds its results to them.

    If the equation has effects, its operands become dependent, too: it may write to a reference.

    Args:
        equation: the equation.
        dependent: the ids of the dependent variables.
    """
    if dependent.isdisjoint(map(id, equation.invars)):
        return False
    dependent.update(map(id, equation.outvars))
    if equation.effects:
        dependent.update([id(x) for x in equation.invars if not isinstance(x, Literal)])
    return True


def _is_supported(eqns: Sequence[Any]) -> bool:
    """Returns whether equations multiply or decompose a matrix, and have no effects or user shardings."""
    if not any(map(_is_costly, eqns)):
        return False
    all_eqns = [*equations.with_inner_equations(eqns)]
    names = {*map(primitive_name, all_eqns)}
    is_restricted = any(eqn.effects or any(user_shardings_of(eqn)) for eqn in all_eqns)
    return _UNSUPPORTED.isdisjoint(names) and not is_restricted


def _is_costly(equation: Any) -> bool:
    """Returns whether an equation, or one in its inner jaxprs, is a matmul or a decomposition."""
    name = primitive_name(equation)
    if name in _COSTLY or name in ELEMENTWISE:  # a fast path for most equations
        return name in _COSTLY
    inner_eqns = map(equations.all_equations, equations.inner_jaxprs(equation))
    return any(primitive_name(eqn) in _COSTLY for eqn in itertools.chain.from_iterable(inner_eqns))


def _matrix_function(
    jaxpr: Any,
    root: Any,
    eqns: Sequence[Any],
    roots: Mapping[int, Any],
    readers: Mapping[int, set[int]],
    scalars: Mapping[int, Any],
) -> MatrixFunction:
    """Returns the function that some equations compute, without cheap equations before and after it.

    Args:
        jaxpr: the jaxpr of the equations.
        root: the value that they compute from.
        eqns: the equations.
        roots: id of a value -> its root.
        readers: id of a value -> the ids of the equations that read it; 0 stands for the jaxpr's results.
        scalars: id of a value that is computed from scalars -> its equation.
    """
    kept = {id(eqn): eqn for eqn in eqns}
    for equation in reversed(eqns):
        large = {id(x) for x in equation.invars if roots.get(id(x)) is root and size_of(x) > _MAX_SCALAR_SIZE}
        result_readers = set().union(*[readers.get(id(var), ()) for var in equation.outvars])
        is_cheap = primitive_name(equation) in _CHEAP
        if len(large - {id(root)}) <= 1 and is_cheap and result_readers.isdisjoint(kept):
            del kept[id(equation)]
    while len(first := readers[id(root)] & kept.keys()) == 1:
        equation = kept[first.pop()]
        [result] = equation.outvars[:1]
        is_narrower = result.aval.dtype.itemsize <= root.aval.dtype.itemsize
        if primitive_name(equation) not in _CHEAP or size_of(result) != size_of(root) or not is_narrower:
            break
        del kept[id(equation)]
        root = result
    computed = [var for eqn in kept.values() for var in eqn.outvars]
    results = [var for var in computed if not readers.get(id(var), set()) <= kept.keys()]
    inside = {id(root), *map(id, computed)}
    free: dict[int, Any] = {}
    external = [x for eqn in kept.values() for x in eqn.invars if id(x) not in inside]
    for x in external:  # grows meanwhile
        if id(x) in scalars:
            external += scalars[id(x)].invars
        elif not isinstance(x, Literal):
            free[id(x)] = x
    needed = replace_jaxpr(jaxpr, eqns=[*dict.fromkeys(scalars.values()), *kept.values()])
    function_jaxpr = extract_subjaxpr(needed, [root, *free.values()], results)
    return MatrixFunction(root, [*free.values()], [*kept.values()], results, function_jaxpr)
