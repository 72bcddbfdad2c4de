"""Functions of a matrix in a jaxpr: equations that begin with one value, and multiply or decompose it."""

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

# Values of so many elements are scalars, or coefficients.
_FEW = 64
_COSTLY = DECOMPOSITIONS | {'dot_general'}
_PLAIN = SHAPE_OPS | ELEMENTWISE | {'reduce_sum', 'reduce_max'}
# For a stack of matrices both branches of a `cond` would run: a loop in the wrong one may not end, and its
# gradient may be nan.
_LEFT = SHARDING_OPS | {'cond'}


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixFunction:
    """A function of a matrix, or of a stack of them.

    Attributes:
        root: the value that it begins with.
        scalars: the scalars that it takes in besides.
        equations: its equations.
        results: those of its values that others read.
        jaxpr: the jaxpr of the results, of the root and the scalars.
    """

    root: Any
    scalars: Sequence[Any]
    equations: Sequence[Any]
    results: Sequence[Any]
    jaxpr: Any

    @property
    def is_stack(self) -> bool:
        """Whether the first dimension of the root may be a stack."""
        shape = shape_of(self.root)
        return len(shape) > 2 and shape[0] > 1

    @property
    def kind(self) -> Any:
        """A key that functions have in common if they compute the same."""
        inside = [part for each in equations.all_equations(self.jaxpr) for part in param_values(each)]
        constants = [id(value) for part in inside for value in getattr(part, 'consts', ())]
        return shape_of(self.root), (*map(id, self.scalars),), (*constants,), str(self.jaxpr)


def find_matrix_functions(jaxpr: Any, shapes: Container[tuple[int, ...]]) -> Iterator[MatrixFunction]:
    """The functions of a matrix in a jaxpr that do not depend on each other.

    Args:
        jaxpr: the jaxpr, open or closed.
        shapes: the shapes of weights; a root has one of these.
    """
    inner = open_jaxpr(jaxpr)
    roots: dict[int, Any] = {}  # of each value that is computed of one alone
    scalars: dict[int, Any] = {}  # what is computed of scalars alone -> its equation
    computed: dict[Any, list[Any]] = {}  # root -> the equations of its values

    def begin(variables: Sequence[Any]) -> None:
        roots.update({id(var): var for var in variables if size_of(var) > _FEW})

    last = next((i for i in reversed(range(len(inner.eqns))) if _is_costly(inner.eqns[i])), None)
    if last is None:
        return
    begin(inner.invars)
    for i, equation in enumerate(inner.eqns):
        own = {*map(roots.get, map(id, equation.invars))} - {None}
        if len(own) == 1:
            [root] = own
            roots.update(dict.fromkeys(map(id, equation.outvars), root))
            computed.setdefault(root, []).append(equation)
        elif own:
            begin(equation.outvars)
        elif not equation.effects:
            scalars.update(dict.fromkeys(map(id, equation.outvars), equation))
        # What is behind, such as an optimizer, makes no function of a matrix.
        if i == last and not any(
            shape_of(root) in shapes and any(map(_is_costly, own)) for root, own in computed.items()
        ):
            return
    found = {root: own for root, own in computed.items() if shape_of(root) in shapes and _multiplies(own)}
    if not found:
        return
    readers: dict[int, set[int]] = {id(var): {0} for var in inner.outvars}
    for equation in inner.eqns:
        for x in equation.invars:
            readers.setdefault(id(x), set()).add(id(equation))
    every = [_function(jaxpr, root, own, roots, readers, scalars) for root, own in found.items()]
    every = [each for each in every if equations.draws_same_under_vmap(each.jaxpr)]
    late = {id(var) for function in every for var in function.results}
    gone = {id(each) for function in every for each in function.equations}
    for equation in inner.eqns:
        if id(equation) not in gone:
            propagate_late(equation, late)
    yield from [each for each in every if late.isdisjoint(map(id, [each.root, *each.scalars]))]


def propagate_late(equation: Any, late: set[int]) -> bool:
    """Whether an equation reads what is late. Then its results are, and operands that it has effects on."""
    if late.isdisjoint(map(id, equation.invars)):
        return False
    late.update(map(id, equation.outvars))
    if equation.effects:  # a reference that it writes is read behind it
        late.update([id(x) for x in equation.invars if not isinstance(x, Literal)])
    return True


def _multiplies(own: Sequence[Any]) -> bool:
    """Whether some of these equations, or those inside, multiply or decompose, and users place no result."""
    if not any(map(_is_costly, own)):
        return False
    every = [*equations.with_inner_equations(own)]
    names = {*map(primitive_name, every)}
    placed = any(each.effects or any(user_shardings_of(each)) for each in every)
    return _LEFT.isdisjoint(names) and not placed


def _is_costly(equation: Any) -> bool:
    """Whether an equation, or one inside it, multiplies or decomposes."""
    name = primitive_name(equation)
    if name in _COSTLY or name in ELEMENTWISE:  # most
        return name in _COSTLY
    inside = map(equations.all_equations, equations.inner_jaxprs(equation))
    return any(primitive_name(each) in _COSTLY for each in itertools.chain.from_iterable(inside))


def _function(
    jaxpr: Any,
    root: Any,
    own: Sequence[Any],
    roots: Mapping[int, Any],
    readers: Mapping[int, set[int]],
    scalars: Mapping[int, Any],
) -> MatrixFunction:
    """The function, without what only writes its matrix in another way in front and behind."""
    kept = {id(each): each for each in own}
    for equation in reversed(own):
        large = {id(x) for x in equation.invars if roots.get(id(x)) is root and size_of(x) > _FEW}
        read = set().union(*[readers.get(id(var), ()) for var in equation.outvars])
        if len(large - {id(root)}) <= 1 and primitive_name(equation) in _PLAIN and read.isdisjoint(kept):
            del kept[id(equation)]
    while len(first := readers[id(root)] & kept.keys()) == 1:
        equation = kept[first.pop()]
        [after] = equation.outvars[:1]
        is_narrower = after.aval.dtype.itemsize <= root.aval.dtype.itemsize
        if primitive_name(equation) not in _PLAIN or size_of(after) != size_of(root) or not is_narrower:
            break
        del kept[id(equation)]
        root = after
    made = [var for each in kept.values() for var in each.outvars]
    results = [var for var in made if not readers.get(id(var), set()) <= kept.keys()]
    inside = {id(root), *map(id, made)}
    free: dict[int, Any] = {}
    taken_in = [x for each in kept.values() for x in each.invars if id(x) not in inside]
    for x in taken_in:  # which grows meanwhile
        if id(x) in scalars:
            taken_in += scalars[id(x)].invars
        elif not isinstance(x, Literal):
            free[id(x)] = x
    every = replace_jaxpr(jaxpr, eqns=[*dict.fromkeys(scalars.values()), *kept.values()])
    part = extract_subjaxpr(every, [root, *free.values()], results)
    return MatrixFunction(root, [*free.values()], [*kept.values()], results, part)
