"""Flattening of a batch that is not the major dimension, as ``x.reshape(T * B, F)`` in time-major models.

The elements of an example are then apart in the flattened dimension, and a device with a block of examples
would exchange them to get a contiguous block. Most models do not depend on the order: they treat all elements
of the dimension alike, reduce them, and split the dimension again. The rewrite then orders it by device: in
place of ``(T, B)``, it flattens ``(n, T, B / n)``, for n blocks of examples. On a device, that is the reshape
of its own examples.

The dimensions of the step are sorted into classes of equal order (`scalax._jaxpr.dim_classes`). A class gets
another order only if every equation is known to treat the elements alike, so no argument, result or constant
of the step has a dimension of the class. Random bits and iotas depend on the index of an element: they are
computed in the original order, and then flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from scalax._jax import equations
from scalax._jax.equations import (
    WITH_JAXPRS,
    broadcast_dims,
    dim_of,
    inner_jaxprs,
    loop_of,
    open_jaxpr,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.random_bits import depends_on_indices, random_bits_of_shape
from scalax._jax.rewriting import (
    Rewriter,
    replace_jaxpr,
    trace_added_equation,
    with_new_results,
    with_results,
)
from scalax._jaxpr.batch_dims import reduced_dims
from scalax._jaxpr.dim_classes import DimIds
from scalax._jaxpr.dim_rules import (
    ALONG_DIM,
    SCATTERS,
    UNKNOWN,
    WINDOW_REDUCTIONS,
    OperandDim,
    dim_rule,
    reshape_groups,
)
from scalax._spmd.batch.batch_sources import batch_sources
from scalax._spmd.batch.replicated_batch_dims import BatchDimClasses, sharded_part
from scalax._spmd.placements.placement import Shard, shards_examples
from scalax._spmd.rewrites.facts import StepFacts
from scalax._spmd.values import is_replicated

# The order of the elements that they reduce changes nothing but rounding.
_REDUCTIONS = frozenset(
    (
        *('dot_general', 'conv_general_dilated', 'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod'),
        *('reduce_and', 'reduce_or', 'reduce_xor', 'scatter-add', 'scatter-sub', 'scatter-max'),
        'scatter-min',
    )
)
_MAY_ACT_ALONG = ALONG_DIM | WINDOW_REDUCTIONS | {'pad', 'select_and_scatter_add', 'select_and_gather_add'}
_RANDOM = frozenset(('random_bits', 'random_split', 'random_fold_in', 'random_gamma'))


class _Order(NamedTuple):
    """The order of a flattened dimension of `outer * batch * inner` elements, by blocks of the batch."""

    outer: int
    batch: int
    inner: int


def interleave_batches(jaxpr: Any, facts: StepFacts) -> Any:
    """Orders flattened dimensions by device. Returns the same jaxpr if there are none.

    Args:
        jaxpr: the closed jaxpr.
        facts: the properties of the step.
    """
    count = math.prod(facts.mesh.shape[axis] for axis in facts.axes)
    sources = _batch_dims(jaxpr, facts)
    if facts.is_pipelined or not _may_merge_batch(jaxpr, {shape_of(var)[dim] for var, dim in sources}, count):
        return jaxpr
    orders = _OrderAnalysis(jaxpr, sources, count)
    return _Interleaving(orders, count).jaxpr(jaxpr) if orders.by_root else jaxpr


def merges_dims(equation: Any) -> bool:
    """Returns whether a `reshape` merges dimensions."""
    return any(len(old_dims) > 1 for old_dims, _ in reshape_groups(equation))


def _batch_dims(jaxpr: Any, facts: StepFacts) -> list[tuple[Any, int]]:
    """Returns the batches of a step, with their batch dimensions; empty if the batch axes shard several."""
    sources = list[tuple[Any, int]]()
    for var, argument in zip(open_jaxpr(jaxpr).invars, facts.arguments, strict=True):
        [placement, *others] = argument.placements
        if any(map(shards_examples, argument.placements)):
            if any(other != placement for other in others):
                return []
            assert isinstance(placement, Shard)
            sources.append((var, placement.dim))
    if not sources and all(argument.is_state for argument in facts.arguments):
        sharded = [not is_replicated(argument.placements) for argument in facts.arguments]
        sources = [
            (source.var, source.dim)
            for source in batch_sources(jaxpr, sharded)
            if {*source.axes} == {*facts.axes}
        ]
    return sources


def _may_merge_batch(jaxpr: Any, sizes: set[int], count: int) -> bool:
    """Whether a reshape may merge a batch, or a part of it, that is not the major dimension.

    Args:
        jaxpr: the jaxpr.
        sizes: the sizes of the batches.
        count: the number of blocks of examples.
    """
    if not sizes:
        return False
    groups = {
        (
            tuple([shape_of(x.invars[0])[dim] for dim in old]),
            tuple([shape_of(x.outvars[0])[dim] for dim in new]),
        )
        for x in _distinct_equations(jaxpr)
        if primitive_name(x) == 'reshape'
        for old, new in reshape_groups(x)
    }
    # A batch may be split into microbatches first.
    parts = {size for old, new in groups if len(old) == 1 and old[0] in sizes for size in new}
    batches = {size for size in sizes | parts if size % count == 0}
    return any(not batches.isdisjoint(old[1:]) for old, _ in groups)


class _OrderClasses(BatchDimClasses):
    """Classes of dimensions whose elements are in the same order.

    Attributes:
        fixed: the ids of dimensions whose order may not change.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.fixed: set[int] = set()
        super().__init__(jaxpr, 1)

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        results = super().eval_primitive(name, equation, operands)
        if name in SCATTERS:
            for group in reduced_dims(equation):
                self.unite([operands[operand][dim] for operand, dim in group])
        return results

    def element_of(self, stack: DimIds) -> DimIds:
        self.fixed.update(stack[:1])
        return stack[1:]

    def stack_of(self, element: DimIds) -> DimIds:
        stacked = super().stack_of(element)
        self.fixed.update(stacked[:1])
        return stacked

    def control_dependence(
        self, equation: Any, predicate: Callable[[], DimIds], results: Sequence[DimIds]
    ) -> Sequence[DimIds]:
        predicate()
        if primitive_name(equation) == 'while':  # the condition of a loop is not rewritten
            for var in open_jaxpr(loop_of(equation).cond).invars:
                self.fixed.update(self.of(var))
        return results

    def _reshape(self, equation: Any, operand_ids: DimIds, new_ids: DimIds) -> DimIds:
        result_ids = [*new_ids]
        for old_dims, new_dims in reshape_groups(equation):
            if len(old_dims) == len(new_dims) == 1:
                result_ids[new_dims[0]] = operand_ids[old_dims[0]]
        return tuple(result_ids)


class _OrderAnalysis:
    """The classes of dimensions that get another order.

    Args:
        jaxpr: the jaxpr of the step.
        batches: its batches, with their batch dimensions.
        count: the number of blocks of examples.

    Attributes:
        by_root: the order of classes, by their representative.
    """

    def __init__(self, jaxpr: Any, batches: Sequence[tuple[Any, int]], count: int) -> None:
        self._classes, self._count = _OrderClasses(jaxpr), count
        self.by_root: dict[int, _Order] = {}
        self._fixed: set[int] = set()  # classes that keep their order
        self._merged: set[tuple[int, int]] = set()  # classes, and those that they are merged into
        self._equations = [*_distinct_equations(jaxpr)]
        self._flattened = [*self._flattened_groups()]
        arguments = dict(zip(map(id, open_jaxpr(jaxpr).invars), self._classes.arguments, strict=True))
        self._sharded = {
            self._classes.union_find.root((arguments.get(id(var)) or self._classes.of(var))[dim])
            for var, dim in batches
        }
        self._propagate()
        if self.by_root:
            self._fix_ends(jaxpr)
            for equation in self._equations:
                self._check(equation)
            self._drop_fixed()

    def root(self, atom: Any, dim: int) -> int:
        """Returns the representative of the class of a dimension; -1 if it has none."""
        ids = self._classes.of(atom)
        return self._classes.union_find.root(ids[dim]) if len(ids) == len(shape_of(atom)) else -1

    def order(self, atom: Any, dim: int) -> _Order | None:
        """Returns the new order of a dimension; None if it keeps its order."""
        return self.by_root.get(self.root(atom, dim)) if shape_of(atom)[dim] > 1 else None

    def interleaved(self, equation: Any) -> tuple[bool, int, _Order] | None:
        """Returns the dimension in which a reshape merges the batch, or which it splits, and its new order.

        Returns None if there is none. The first result is whether it merges.
        """
        [var], [operand] = equation.outvars, equation.invars[:1]
        for old_dims, new_dims in reshape_groups(equation):
            before, after = self.order(operand, old_dims[0]), self.order(var, new_dims[0])
            if after is not None and before is None:
                return True, new_dims[0], after
            if before is not None and after is None:
                return False, old_dims[0], before
        return None

    def _flattened_groups(self) -> Iterator[_FlattenedGroup]:
        """Yields the groups of dimensions that reshapes merge or split. The order of any others is fixed."""
        for equation in self._equations:
            if primitive_name(equation) != 'reshape':
                continue
            [var], [operand] = equation.outvars, equation.invars[:1]
            grouped = set[int]()
            for groups in reshape_groups(equation):
                # Dimensions that are merged and split at once are flattened to a dimension in between.
                flat = [
                    self.root(x, x_dims[0])
                    for x, x_dims in zip((operand, var), groups, strict=True)
                    if len(x_dims) == 1
                ]
                flat += [] if flat else self._classes.new_ids(operand)[:1]
                for x, x_dims in zip((operand, var), groups, strict=True):
                    roots = [self.root(x, dim) for dim in x_dims]
                    grouped.update(roots)
                    if len(roots) > 1:
                        yield _FlattenedGroup([shape_of(x)[dim] for dim in x_dims], roots, flat[0])
            dims = ((x, dim) for x in (operand, var) for dim, size in enumerate(shape_of(x)) if size > 1)
            self._fixed |= {self.root(x, dim) for x, dim in dims} - grouped

    def _propagate(self) -> None:
        """Finds the sharded classes, and the orders of those with a batch that is not the major dimension."""
        before = -1
        while before != (before := len(self._sharded) + len(self.by_root) + len(self._merged)):
            for group in self._flattened:
                self._propagate_sharded(group)
                self._propagate_order(group)

    def _propagate_sharded(self, group: _FlattenedGroup) -> None:
        """Records that the major dimension of a group is sharded if the flattened one is, or vice versa."""
        if self._sharded.isdisjoint((group.roots[0], group.flat)):
            return
        if group.sizes[0] % self._count == 0:
            self._sharded |= {group.roots[0], group.flat}
        elif (dim := sharded_part(range(len(group.sizes)), group.sizes, self._count)) is not None:
            self._sharded.add(group.roots[dim])  # as a batch that is split into microbatches

    def _propagate_order(self, group: _FlattenedGroup) -> None:
        """Relates the order of a flattened dimension to those of the dimensions of its group."""
        sizes, roots, flat = group.sizes, group.roots, group.flat
        self._fixed.update([root for root in roots[1:] if root in self.by_root])
        rest = math.prod(sizes[1:])
        if (major := self.by_root.get(roots[0])) is not None:
            self._set(flat, major._replace(inner=major.inner * rest))
            self._merged.add((roots[0], flat))
        elif (order := self.by_root.get(flat)) is None and flat in self._sharded:
            pass
        elif order is None:
            dim = next((i for i, root in enumerate(roots) if root in self._sharded), 0)
            if dim and sizes[dim] % self._count == 0:
                self._set(flat, _Order(math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :])))
        elif (batch := _batch_of(sizes, order)) is not None:
            self._sharded.add(roots[batch])
        elif order.inner % rest == 0:
            self._set(roots[0], order._replace(inner=order.inner // rest))
            self._merged.add((roots[0], flat))
        else:
            self._fixed.add(flat)

    def _set(self, root: int, order: _Order) -> None:
        if self.by_root.setdefault(root, order) != order:
            self._fixed.add(root)

    def _fix_ends(self, jaxpr: Any) -> None:
        """Fixes the order of arguments, results and constants, and of the stacks of loops."""
        constants = [var for inner in _distinct_jaxprs(jaxpr) for var in _constants(inner)]
        ends = [self._classes.of(atom) for atom in (*open_jaxpr(jaxpr).outvars, *constants)]
        for ids in (*ends, *self._classes.arguments, [*self._classes.fixed]):
            self._fixed.update(map(self._classes.union_find.root, ids))

    def _check(self, equation: Any) -> None:
        """Fixes the orders of dimensions on whose order an equation may depend."""
        name = primitive_name(equation)
        if name in WITH_JAXPRS:
            return
        if name == 'reshape':
            self._check_reshape(equation)
            return
        operands, results = self._ordered(equation.invars), self._ordered(equation.outvars)
        if not operands and not results:
            return
        rule, accepted = dim_rule(equation), set[OperandDim]()
        if name in _REDUCTIONS and rule is not UNKNOWN:
            for group in reduced_dims(equation):
                if name == 'conv_general_dilated' and len(group) < 2:  # the channels of groups of features
                    continue
                if len({self.root(equation.invars[i], dim) for i, dim in group}) == 1:
                    accepted.update(group)
        for (i, dim), root in results.items():
            size = shape_of(equation.outvars[i])[dim]
            candidates = () if rule is UNKNOWN else rule.results[i][dim]
            sources = {x for x in candidates if shape_of(equation.invars[x[0]])[x[1]] == size}
            is_alike = bool(sources) and all(operands.get(x) == root for x in sources)
            is_alike = is_alike and _treats_alike(name, equation, dim, sources)
            if not is_alike and not self._creates(name, equation, dim):
                self._fixed.add(root)
            accepted |= sources
        self._fixed.update([root for operand_dim, root in operands.items() if operand_dim not in accepted])

    def _check_reshape(self, equation: Any) -> None:
        """Fixes the orders of a reshape that would merge or split several batches."""
        [var], [operand] = equation.outvars, equation.invars[:1]
        orders = [
            (self.order(operand, old_dims[0]), self.order(var, new_dims[0]))
            for old_dims, new_dims in reshape_groups(equation)
        ]
        if sum((before is None) != (after is None) for before, after in orders) > 1:
            self._fixed.update(self._ordered([operand, var]).values())

    def _creates(self, name: str, equation: Any, dim: int) -> bool:
        """Whether an equation creates a dimension, and can do so in any order."""
        if name == 'broadcast_in_dim':
            sizes = dict(zip(broadcast_dims(equation), shape_of(equation.invars[0]), strict=True))
            return sizes.get(dim, 1) == 1
        if name == 'iota':
            return True
        return depends_on_indices(equation) and len(self._ordered(equation.outvars)) == 1

    def _ordered(self, atoms: Sequence[Any]) -> dict[tuple[int, int], int]:
        """Returns the classes of the dimensions of values that get another order."""
        return {
            (i, dim): root
            for i, atom in enumerate(atoms)
            for dim, size in enumerate(shape_of(atom))
            if size > 1 and (root := self.root(atom, dim)) in self.by_root
        }

    def _drop_fixed(self) -> None:
        """Drops the orders of fixed classes, and of those that are merged with them."""
        while dropped := {*self.by_root} & self._fixed:
            for root in dropped:
                del self.by_root[root]
            self._fixed.update([x for pair in self._merged if not dropped.isdisjoint(pair) for x in pair])


class _FlattenedGroup(NamedTuple):
    """Dimensions that a reshape merges into one dimension, or into which it splits one dimension.

    Attributes:
        sizes: the sizes of the dimensions.
        roots: their classes.
        flat: the class of the flattened dimension.
    """

    sizes: list[int]
    roots: list[int]
    flat: int


def _batch_of(sizes: Sequence[int], order: _Order) -> int | None:
    """Returns which of several dimensions is the batch of the order to which they are flattened."""
    outer = [math.prod(sizes[:i]) for i in range(len(sizes))]
    pairs = enumerate(zip(outer, sizes, strict=True))
    return next((i for i, pair in pairs if i and pair == (order.outer, order.batch)), None)


def _treats_alike(name: str, equation: Any, dim: int, sources: set[OperandDim]) -> bool:
    """Whether an equation treats all elements of a dimension of its results alike."""
    if name == 'ragged_dot_general' or (name in _MAY_ACT_ALONG and equations.acts_along(equation, dim)):
        return False
    if name in SCATTERS | {'dynamic_update_slice'} and all(operand == 0 for operand, _ in sources):
        return False
    if name == 'conv_general_dilated':
        return all(operand == 0 for operand, _ in sources)
    return name not in _RANDOM or ((0, 0) in sources and equations.draws_per_key(equation))


def _distinct_jaxprs(jaxpr: Any) -> list[Any]:
    """Returns a jaxpr and its inner jaxprs, open, without repetitions."""
    jaxprs, seen = [open_jaxpr(jaxpr)], {id(open_jaxpr(jaxpr))}
    for current in jaxprs:  # which grows
        for equation in current.eqns:
            for inner in inner_jaxprs(equation):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    jaxprs.append(inner)
    return jaxprs


def _constants(jaxpr: Any) -> list[Any]:
    """Returns the variables of a jaxpr that are neither its arguments nor results of its equations."""
    defined = {id(var) for vars_ in (jaxpr.invars, *[x.outvars for x in jaxpr.eqns]) for var in vars_}
    return [x for equation in jaxpr.eqns for x in equation.invars if id(x) not in defined]


def _distinct_equations(jaxpr: Any) -> Iterator[Any]:
    for inner in _distinct_jaxprs(jaxpr):
        yield from inner.eqns


class _Interleaving(Rewriter):
    """Changes the order of flattened dimensions, where they are flattened and split."""

    def __init__(self, orders: _OrderAnalysis, count: int) -> None:
        super().__init__()
        self._orders, self._count = orders, count

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, open or closed, whose flattened dimensions are in their new order."""
        if jaxpr in self._rewritten:
            return self._rewritten[jaxpr]
        changed = [*map(self._reordered, open_jaxpr(jaxpr).eqns)]
        if not any(changed):
            return super().jaxpr(jaxpr)
        eqns = [
            x
            for equation, new in zip(open_jaxpr(jaxpr).eqns, changed, strict=True)
            for x in new or [self._equation(equation)]
        ]
        self._rewritten[jaxpr] = replace_jaxpr(jaxpr, eqns=eqns)
        return self._rewritten[jaxpr]

    def _reordered(self, equation: Any) -> Sequence[Any]:
        """Returns the equations that replace an equation; none if it stays."""
        name = primitive_name(equation)
        if name == 'reshape' and (interleaved := self._orders.interleaved(equation)) is not None:
            merges, dim, order = interleaved
            [operand, *_], [var] = equation.invars, equation.outvars
            shape = self._split_shape(shape_of(var if merges else operand), dim, order, merges)
            return _reshape_and_swap(equation, operand, shape, dim)
        if name == 'iota' or depends_on_indices(equation):
            [var] = equation.outvars
            for dim in range(len(shape_of(var))):
                new_order = self._orders.order(var, dim)
                if new_order is not None and (name != 'iota' or dim == dim_of(equation)):
                    return self._created(name, equation, dim, new_order)
        return ()

    def _created(self, name: str, equation: Any, dim: int, order: _Order) -> list[Any]:
        """Returns equations that compute a value in the original order, and flatten a dimension of it."""
        shape, created = shape_of(equation.outvars[0]), with_new_results(equation)
        if name == 'random_bits':  # of which a device can draw those of its examples
            created = random_bits_of_shape(equation, (*shape[:dim], *order, *shape[dim + 1 :]))
        new_shape = self._split_shape(shape, dim, order, merges=True)
        return [created, *_reshape_and_swap(equation, created.outvars[0], new_shape, dim)]

    def _split_shape(self, shape: Sequence[int], dim: int, order: _Order, merges: bool) -> tuple[int, ...]:
        """Returns a shape with a dimension split into blocks, before it is merged or after it was."""
        outer = (order.outer, self._count) if merges else (self._count, order.outer)
        return (*shape[:dim], *outer, order.batch // self._count * order.inner, *shape[dim + 1 :])


def _reshape_and_swap(equation: Any, operand: Any, shape: Sequence[int], dim: int) -> list[Any]:
    """Returns equations that replace another one: they reshape a value, swap two dimensions, and reshape it.

    Args:
        equation: the equation that they replace.
        operand: the value.
        shape: the shape after the first reshape.
        dim: the dimension that is swapped with the next one.
    """
    permutation, result_shape = [*range(len(shape))], shape_of(equation.outvars[0])
    permutation[dim : dim + 2] = dim + 1, dim
    functions = (
        lambda x: jax.lax.reshape(x, shape),
        lambda x: jax.lax.transpose(x, permutation),
        lambda x: jax.lax.reshape(x, result_shape),
    )
    added = list[Any]()
    for function in functions:
        added.append(trace_added_equation(function, equation, [operand]))
        [operand] = added[-1].outvars
    return [*added[:-1], with_results(added[-1], equation.outvars)]
