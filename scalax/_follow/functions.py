"""Finds the functions of a matrix in a jaxpr: equations that begin with one value, and multiply it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from scalax._follow.said import SAID, placed_by_user
from scalax._jax import equations
from scalax._jax.equations import CALLS, Literal, jaxprs_in, opened, shape_of, values_in
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import part_of
from scalax._jaxprs.dims import ELEMENTWISE, FORWARDS

# Values of so many elements are scalars, or coefficients.
_FEW = 64
_PLAIN = FORWARDS | ELEMENTWISE | {'reduce_sum', 'reduce_max'}
_MULTIPLYING = frozenset({'dot_general', 'scan', 'while', 'cond', *CALLS})


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function of a matrix, or of a stack of them.

    Attributes:
        root: the value that it begins with.
        free: the scalars that it takes in besides.
        equations: its equations.
        results: those of its values that others read.
        part: the jaxpr of the results, of the root and the scalars.
    """

    root: Any
    free: Sequence[Any]
    equations: Sequence[Any]
    results: Sequence[Any]
    part: Any

    @property
    def is_stack(self) -> bool:
        """Whether the first dimension of the root may be a stack."""
        shape = shape_of(self.root)
        return len(shape) > 2 and shape[0] > 1

    @property
    def kind(self) -> Any:
        """What functions have in common that compute the same."""
        inside = [part for each in equations.equations(self.part) for part in values_in(each)]
        constants = [id(value) for part in inside for value in getattr(part, 'consts', ())]
        return shape_of(self.root), (*map(id, self.free),), (*constants,), str(self.part)


def functions_of_matrices(jaxpr: Any, shapes: Container[tuple[int, ...]]) -> Iterator[Function]:
    """The functions of a matrix in a jaxpr that do not depend on each other.

    Args:
        jaxpr: the jaxpr, open or closed.
        shapes: the shapes of weights; a root has one of these.
    """
    inner = opened(jaxpr)
    roots = {id(var): var for var in inner.invars if _size(var) > _FEW}  # of each value
    scalars: dict[int, Any] = {}  # what is computed of scalars alone -> its equation
    found: dict[int, list[Any]] = {}
    multiplying: dict[int, Any] = {}
    for equation in inner.eqns:
        own = {id(root): root for x in equation.invars if (root := roots.get(id(x))) is not None}
        if len(own) == 1:
            [(key, root)] = own.items()
            roots.update(dict.fromkeys(map(id, equation.outvars), root))
            if shape_of(root) in shapes:
                found.setdefault(key, []).append(equation)
                if equation.primitive.name in _MULTIPLYING:
                    multiplying[key] = root
        elif own:
            roots.update({id(var): var for var in equation.outvars if _size(var) > _FEW})
        elif not equation.effects:
            scalars.update(dict.fromkeys(map(id, equation.outvars), equation))
    own = {key: found[key] for key in multiplying if _multiplies(found[key])}
    if not own:
        return
    readers: dict[int, set[int]] = {id(var): {0} for var in inner.outvars}
    for equation in inner.eqns:
        for x in equation.invars:
            readers.setdefault(id(x), set()).add(id(equation))
    every = [*_trimmed(jaxpr, multiplying, own, roots, readers, scalars)]
    late = {id(var) for function in every for var in function.results}
    gone = {id(each) for function in every for each in function.equations}
    for equation in inner.eqns:
        if id(equation) not in gone and not late.isdisjoint(map(id, equation.invars)):
            late.update(map(id, equation.outvars))
    yield from [each for each in every if late.isdisjoint(map(id, [each.root, *each.free]))]


def _multiplies(own: Sequence[Any]) -> bool:
    """Whether some of these equations are products, also inside others, and the user places none of them."""
    every = [each for equation in own for each in (equation, *_inside(equation))]
    names = {primitive_name(each) for each in every}
    return (
        'dot_general' in names
        and SAID.isdisjoint(names)
        and not any(each.effects or any(placed_by_user(each)) for each in every)
    )


def _inside(equation: Any) -> Iterator[Any]:
    for jaxpr in jaxprs_in(equation):
        yield from equations.equations(jaxpr)


def _trimmed(
    jaxpr: Any,
    multiplying: dict[int, Any],
    found: dict[int, list[Any]],
    roots: dict[int, Any],
    readers: dict[int, set[int]],
    scalars: dict[int, Any],
) -> Iterator[Function]:
    """Functions without what only writes a matrix in another way, in front of the products and behind."""
    for key, own in found.items():
        root = multiplying[key]
        kept = {id(each): each for each in own}
        for equation in reversed(own):
            taken = {id(x) for x in equation.invars if roots.get(id(x)) is root and _size(x) > _FEW}
            read = {reader for var in equation.outvars for reader in readers.get(id(var), ())}
            is_plain = primitive_name(equation) in _PLAIN
            if len(taken - {id(root)}) <= 1 and is_plain and read.isdisjoint(kept):
                del kept[id(equation)]
        while len(first := readers[id(root)] & kept.keys()) == 1:
            equation = kept[first.pop()]
            [after] = equation.outvars[:1]
            is_narrower = after.aval.dtype.itemsize <= root.aval.dtype.itemsize
            if primitive_name(equation) not in FORWARDS or _size(after) != _size(root) or not is_narrower:
                break
            del kept[id(equation)]
            root = after
        made = {id(var) for each in kept.values() for var in each.outvars}
        results = [
            var
            for each in kept.values()
            for var in each.outvars
            if not readers.get(id(var), set()) <= kept.keys()
        ]
        free: dict[int, Any] = {}
        taken_in = [x for each in kept.values() for x in each.invars if id(x) not in made and x is not root]
        for x in taken_in:  # which grows meanwhile
            if id(x) in scalars:
                taken_in += scalars[id(x)].invars
            elif not isinstance(x, Literal):
                free[id(x)] = x
        operands = [*free.values()]
        yield Function(root, operands, [*kept.values()], results, part_of(jaxpr, [root, *operands], results))


def _size(atom: Any) -> int:
    return math.prod(shape_of(atom))
