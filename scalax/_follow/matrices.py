"""Functions of single matrices, such as the updates of optimizers that multiply them, spread over devices.

Muon multiplies the momentum of each weight with itself, many times. The compiler gathers the matrices for
that, and much of it is computed on every device. An expert gives whole matrices to each device: stacks of them
move by an all-to-all, and back behind it.

A *function of a matrix* begins with a value, its root, and takes in nothing else but scalars. Roots of which
the same is computed are stacked together: three weights of 32 layers keep 64 devices busy for two matrices'
time, and not three.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._follow.experts import Stored
from scalax._follow.said import SAID, placed_by_user
from scalax._follow.stacks import run_stacked
from scalax._follow.trail import LOST, Trail, Trails, axes_of, closed_spec_of, merged, without
from scalax._follow.types import Arguments
from scalax._jax.equations import (
    CALLS,
    Literal,
    branches,
    called,
    dot_dims,
    equations,
    loop_of,
    opened,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, equation_of, part_of, replaced, run
from scalax._jaxprs.dims import ELEMENTWISE, FORWARDS

# A chip of 400 Tflop/s with links of 100 GB/s, and what it takes to begin two all-to-alls.
_SECONDS_PER_OPERATION, _SECONDS_PER_BYTE, _BEGIN = 1 / 4e14, 1 / 1e11, 2e-5
# Values of so many elements are scalars, or coefficients: functions of a matrix may take them in.
_SMALL = 64
_WITH_PRODUCTS = frozenset({'dot_general', 'scan', 'while', 'cond', *CALLS})


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
    """A function of a matrix, or of a stack of them.

    Attributes:
        root: the value that it begins with.
        equations: its equations.
        free: what it takes in besides.
        results: those of its values that others read.
        part: the jaxpr of the root and the free values.
    """

    root: Any
    equations: Sequence[Any]
    free: Sequence[Any]
    results: Sequence[Any]
    part: Any

    @property
    def is_stack(self) -> bool:
        """Whether the first dimension may be a stack."""
        shape = shape_of(self.root)
        return len(shape) > 2 and shape[0] > 1

    @property
    def kind(self) -> Any:
        """What functions have in common that can be computed at once."""
        return shape_of(self.root), self.root.aval.dtype, (*map(id, self.free),), str(self.part)


def spread_matrices(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Any:
    """The jaxpr, whose functions of matrices run on whole ones; the same one if there are none.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    return _Spreader(jaxpr, arguments, mesh).jaxpr(jaxpr)


class _Spreader(Rewriter):
    """Spreads the functions of matrices of a jaxpr and of those inside it."""

    def __init__(self, whole: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> None:
        super().__init__(lambda equation: equation)
        self._whole, self._mesh, self._axes = whole, mesh, arguments.batch_axes
        self._trails = Trails(dict(mesh.shape), arguments.batch_axes)
        self._given = [
            LOST if self._trails.has_rows(trail) else merged((trail, stored), max(len(trail), len(stored)))
            for trail, stored in zip(arguments.trails, arguments.stored, strict=True)
        ]
        pairs = zip(opened(whole).invars, arguments.trails, strict=False)
        self._shapes = {shape_of(var) for var, trail in pairs if not self._trails.has_rows(trail)}
        self._layouts: Stored | None = None

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with functions of matrices spread."""
        return super().jaxpr(self._spread(jaxpr))

    def _layout(self, root: Any) -> Trail:
        """Where a root is: as the weight that it belongs to."""
        if self._layouts is None:
            self._layouts = Stored(self._whole, self._given, self._trails, ())
        return self._layouts.of(root)

    def _spread(self, jaxpr: Any) -> Any:
        groups: dict[Any, list[_Function]] = {}
        for each in _functions(jaxpr, self._shapes):
            groups.setdefault(each.kind, []).append(each)
        found = [(group, self._equation_of(group)) for group in groups.values()]
        spread = [(group, equation) for group, equation in found if equation is not None]
        if not spread:
            return jaxpr
        gone = [id(each) for group, _ in spread for function in group for each in function.equations]
        late = {id(var) for group, _ in spread for function in group for var in function.results}
        eqns, waiting, left = [], [], len(gone)
        for equation in opened(jaxpr).eqns:
            if id(equation) in gone:
                left -= 1
                if not left:
                    eqns += [*[equation for _, equation in spread], *waiting]
            elif late.isdisjoint(map(id, equation.invars)):
                eqns.append(equation)
            else:
                late.update(map(id, equation.outvars))
                (waiting if left else eqns).append(equation)
        return replaced(jaxpr, eqns=eqns)

    def _equation_of(self, group: Sequence[_Function]) -> Any:
        """One equation that computes all functions of a group on whole matrices; None if that takes longer."""
        first = group[0]
        layouts = [self._layout(function.root) for function in group]
        if first.is_stack:
            size = shape_of(first.root)[0]
        else:
            size, layouts = 1, [((), *layout) if layout else LOST for layout in layouts]
        if any(layout and layout[0] for layout in layouts):  # spread already
            return None
        layout = next(filter(None, layouts), LOST)
        stored = axes_of(layout)
        axes = [*dict.fromkeys([axis for dim in layout for axis in dim] or sorted(self._axes))]
        devices = math.prod(self._mesh.shape[axis] for axis in axes)
        if devices == 1 or not self._pays(group, size, devices, bool(stored)):
            return None
        rank = len(shape_of(first.root)) + (not first.is_stack)
        way = [*_way(layout, [*self._mesh.shape])] if stored else [(tuple(axes), *[()] * (rank - 1))]
        layouts = [each or ((),) * rank for each in layouts]
        [roots, free] = [function.root for function in group], first.free

        def spread(*operands: Any) -> list[Any]:
            matrices = operands[: len(roots)] if first.is_stack else [x[None] for x in operands[: len(roots)]]
            matrices = [*map(self._placed, matrices, layouts)]
            missing = -size * len(roots) % devices
            if missing:  # devices that would have none repeat one
                first_one = matrices[0][:1]
                matrices.append(jnp.broadcast_to(first_one, (missing, *first_one.shape[1:])))
            stack = jnp.concatenate(matrices)
            for each in way:
                stack = self._placed(stack, each)
            given = operands[len(roots) :]
            if first.is_stack:
                pairs = run_stacked(first.part, [(stack, 0), *[(x, None) for x in given]])
                if any(dim != 0 for _, dim in pairs):
                    raise ValueError('the stack moves')
                results = [value for value, _ in pairs]
            else:
                results = jax.vmap(lambda x: run(first.part, [x, *given]))(stack)
            split = zip(*[self._split(x, way, layouts, size) for x in results], strict=True)
            return [x if first.is_stack else x[0] for each in split for x in each]

        last = group[-1].equations[-1]
        results = [var for function in group for var in function.results]
        like = last.replace(invars=[*roots, *free], outvars=results)
        try:
            return equation_of(jax.jit(spread), like)
        except ValueError:
            return None

    def _split(self, stack: Any, way: Sequence[Trail], layouts: Sequence[Trail], size: int) -> Iterator[Any]:
        for each in way[::-1]:
            stack = self._placed(stack, each)
        for i, layout in enumerate(layouts):
            yield self._placed(stack[i * size : (i + 1) * size], layout)

    def _placed(self, x: Any, layout: Trail) -> Any:
        if len(layout) != x.ndim or self._trails.possible(layout, x.shape) != layout and any(layout):
            layout = (layout[0], *[()] * (x.ndim - 1))
        spec = closed_spec_of(layout, x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def _pays(self, group: Sequence[_Function], size: int, devices: int, is_stored: bool) -> bool:
        operations, moved = _work(group[0].part)
        count = size * len(group)
        given = sum(math.prod(shape_of(var)) * var.aval.dtype.itemsize for var in (group[0].root, *group[0].results))
        all_bytes = given * len(group) * (1 / devices if is_stored else 0.5)
        alone = len(group) * (
            operations / (devices if is_stored else 1) * _SECONDS_PER_OPERATION
            + (moved if is_stored else 0) * _SECONDS_PER_BYTE
        )
        most = -(-count // devices)
        spread = most * operations / size * _SECONDS_PER_OPERATION + all_bytes * _SECONDS_PER_BYTE
        return spread + _BEGIN < alone


def _way(layout: Trail, order: Sequence[str]) -> Iterator[Trail]:
    """Where a stack is on its way from this layout to one of whole matrices: one dimension after the other."""
    for axes in sorted(filter(None, layout), key=lambda axes: order.index(axes[0])):
        layout = ((*layout[0], *axes), *[() if each == axes else each for each in layout[1:]])
        yield layout


def _functions(jaxpr: Any, shapes: set[tuple[int, ...]]) -> Iterator[_Function]:
    """The functions of matrices of these shapes that multiply them."""
    inner = opened(jaxpr)
    roots: dict[int, Any] = {id(var): var for var in inner.invars if _size(var) > _SMALL}
    scalars: dict[int, Any] = {}  # what is computed of no large value -> its equation
    found: dict[int, list[Any]] = {}
    multiplying: dict[int, Any] = {}
    for equation in inner.eqns:
        ids = [*map(id, equation.invars)]
        own = {id(root): root for root in map(roots.get, ids) if root is not None}
        if len(own) == 1:
            [(key, root)] = own.items()
            roots.update(dict.fromkeys(map(id, equation.outvars), root))
            if shape_of(root) in shapes:
                found.setdefault(key, []).append(equation)
                if equation.primitive.name in _WITH_PRODUCTS:
                    multiplying[key] = root
        elif own:
            roots.update({id(var): var for var in equation.outvars if _size(var) > _SMALL})
        elif not equation.effects:
            scalars.update(dict.fromkeys(map(id, equation.outvars), equation))
    if not multiplying:
        return
    uses: dict[int, set[int]] = {}
    for equation in inner.eqns:
        for x in equation.invars:
            uses.setdefault(id(x), set()).add(id(equation))
    for x in inner.outvars:
        uses.setdefault(id(x), set()).add(0)
    late: set[int] = set()
    for key, root in multiplying.items():
        own = found[key]
        if any(_is_said(each) for each in own) or not any(map(_operations, own)):
            continue
        yield from _trimmed(jaxpr, root, own, uses, roots, scalars)


def _is_said(equation: Any) -> bool:
    inside = equations_of(equation)
    return any(primitive_name(each) in SAID or any(placed_by_user(each)) or each.effects for each in inside)


def equations_of(equation: Any) -> Iterator[Any]:
    from scalax._jax.equations import jaxprs_in
    yield equation
    for inside in jaxprs_in(equation):
        yield from equations(inside)


def _trimmed(jaxpr, root, own, uses, roots, scalars) -> Iterator[_Function]:
    kept = {id(each): each for each in own}
    for equation in reversed(own):  # what is only written in another way behind the products
        taken = {id(x) for x in equation.invars if roots.get(id(x)) is root}
        read = set().union(*[uses.get(id(var), set()) for var in equation.outvars])
        if len(taken) == 1 and primitive_name(equation) in FORWARDS | ELEMENTWISE and read.isdisjoint(kept):
            del kept[id(equation)]
    while True:
        readers = [each for key in uses[id(root)] if (each := kept.get(key)) is not None]
        if len(readers) != 1 or primitive_name(readers[0]) not in FORWARDS:
            break
        [after] = readers[0].outvars
        if _size(after) != _size(root) or after.aval.dtype.itemsize > root.aval.dtype.itemsize:
            break
        del kept[id(readers[0])]
        root = after
    members = [*kept.values()]
    made = {id(var) for each in members for var in each.outvars}
    free: dict[int, Any] = {}
    taken = [x for each in members for x in each.invars if id(x) not in made and x is not root]
    for x in taken:  # which grows meanwhile
        if id(x) in scalars:
            taken += scalars[id(x)].invars
        elif not isinstance(x, Literal):
            free[id(x)] = x
    results = [
        var for each in members for var in each.outvars if uses.get(id(var), set()) - kept.keys()
    ]
    if members and results:
        free = [*free.values()]
        yield _Function(root, members, free, results, part_of(jaxpr, [root, *free], results))


def _size(atom: Any) -> int:
    return math.prod(shape_of(atom))


def _operations(equation: Any) -> int:
    return _work_of(equation)[0]


def _work(jaxpr: Any) -> tuple[int, int]:
    """The operations of the products of a jaxpr; and the bytes of the smallest value of each product."""
    found = [*map(_work_of, opened(jaxpr).eqns)]
    return sum(a for a, _ in found), sum(b for _, b in found)


def _work_of(equation: Any) -> tuple[int, int]:
    name = primitive_name(equation)
    if name == 'dot_general':
        [result], ((contracted, _), _) = equation.outvars, dot_dims(equation)
        shape = shape_of(equation.invars[0])
        smallest = min(_size(x) for x in (*equation.invars, result))
        operations = 2 * _size(result) * math.prod(shape[i] for i in contracted)
        return operations, 2 * smallest * result.aval.dtype.itemsize
    if name in CALLS:
        return _work(called(equation))
    if name in ('scan', 'while'):
        loop = loop_of(equation)
        operations, moved = _work(loop.body)
        return operations * (loop.length or 1), moved * (loop.length or 1)
    if name == 'cond':
        return max(map(_work, branches(equation)))
    return 0, 0
