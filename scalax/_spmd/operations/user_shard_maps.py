"""The `shard_map` of a user inside a step: along the axes of the batch it runs in place.

The step is manual along the axes of the batch already. Operands are converted to the blocks that the specs
of the `shard_map` say, and the collectives in its body find their axes. The body is partitioned along those
axes of the batch that the `shard_map` leaves out; the collectives in it are along other axes, and take each
example alone. A `shard_map` over other axes, such as that of stages, stays one inside the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from scalax._jax.equations import (
    shape_of,
    shard_map_in_specs,
    shard_map_jaxpr,
    shard_map_manual_axes,
    shard_map_mesh_shape,
    shard_map_out_specs,
)
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.layouts import Layout
from scalax._spmd.placements.placement import (
    REPLICATE,
    Placement,
    Placements,
    RedistributeOp,
    Shard,
    shard_counts,
)
from scalax._spmd.values import Argument, CannotPartition, ShardMapBlocks, Value

_Order = tuple[tuple[str, int, bool], ...]
"""The mesh axes that shard a dimension, from the major one to the minor one: the name and size of each, and
whether it is an axis of the batch."""


class _Axes(NamedTuple):
    """The mesh axes of a `shard_map`.

    Attributes:
        batch: the axes of the batch that it makes manual, with their numbers.
        nested: the other axes that it makes manual.
        left: the numbers of the axes of the batch along which its body is partitioned.
        sizes: the sizes of the axes of the batch.
        mesh: the sizes of all mesh axes.
        names: the names of the axes of the batch.
    """

    batch: dict[str, int]
    nested: frozenset[str]
    left: list[int]
    sizes: Sequence[int]
    mesh: dict[str, int]
    names: Sequence[str]

    def orders(self, spec: PartitionSpec) -> dict[int, _Order]:
        """The manual axes of each dimension that a spec shards."""
        orders = {}
        for dim, entry in enumerate(spec):
            names = entry if isinstance(entry, tuple) else (entry,)
            manual = [name for name in names if name in self.batch or name in self.nested]
            if manual:
                orders[dim] = tuple([(name, self.mesh[name], name in self.batch) for name in manual])
        return orders

    def is_direct(self, order: _Order) -> bool:
        """Whether placements have blocks of this order: the axes of the batch in order, then others."""
        in_batch = [is_batch for *_, is_batch in order]
        numbers = [self.batch[name] for name, _, is_batch in order if is_batch]
        return numbers == sorted(numbers) and in_batch == sorted(in_batch, reverse=True)

    def batch_placements(self, spec: PartitionSpec, *, is_state: bool) -> dict[int, Placement]:
        """The placements along the batch axes that are manual; those of other orders are replicated."""
        placements: dict[int, Placement] = dict.fromkeys(self.batch.values(), REPLICATE)
        for dim, order in self.orders(spec).items():
            if self.is_direct(order):
                for name, _, is_batch in order:
                    if is_batch:
                        placements[self.batch[name]] = Shard(dim, is_state)
        return placements

    def left_placements(
        self, placements: Placements, spec: PartitionSpec, shape: Sequence[int]
    ) -> Placements:
        """The placements along the other batch axes, which have the blocks inside those of the manual axes.

        Where they would not, and where blocks are of different sizes, they are replicated.

        Args:
            placements: placements along these axes.
            spec: the spec of the value.
            shape: the shape of the value in the body.
        """
        orders, found = self.orders(spec), list[Placement]()
        for i, placement in zip(self.left, placements, strict=True):
            if isinstance(placement, Shard) and (order := orders.get(placement.dim)):
                is_minor = all(is_batch and self.batch[name] < i for name, _, is_batch in order)
                placement = placement if is_minor else REPLICATE
            found.append(placement)
        counts = shard_counts(tuple(found), [self.sizes[i] for i in self.left], len(shape))
        uneven = {dim for dim, size in enumerate(shape) if size % counts[dim]}
        return tuple([REPLICATE if isinstance(x, Shard) and x.dim in uneven else x for x in found])

    def kept_inside(
        self, placements: Placements, ends: Placements, spec: PartitionSpec
    ) -> tuple[Placements, dict[int, _Order]]:
        """The placements in which a result leaves the body, and the axes of its dimensions that are joined.

        A result that is handed to another `shard_map`, as JAX hands what a forward pass computes to the
        backward pass, stays in blocks of examples inside those of other axes.

        Args:
            placements: those that it has in the body, along the axes of the batch that are left.
            ends: those that it has outside, along these.
            spec: its spec.
        """
        orders = self.orders(spec)
        joined = {dim: order for dim, order in orders.items() if not self.is_direct(order)}
        found = [*ends]
        for n, (i, placement, end) in enumerate(zip(self.left, placements, ends, strict=True)):
            if not isinstance(placement, Shard) or placement == end:
                continue
            order = orders.get(placement.dim, ())
            if order and not any(is_batch for *_, is_batch in order):
                name = self.names[i]
                before = joined.get(placement.dim, order)
                joined[placement.dim] = (*before, (name, self.mesh[name], True))
                found[n] = placement
        return tuple(found), joined

    def all(self, batch: dict[int, Placement], left: Placements) -> Placements:
        """The placements along all axes of the batch."""
        placements = batch | dict(zip(self.left, left, strict=True))
        return tuple([placements[i] for i in range(len(self.sizes))])


def partition_shard_map(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes what a `shard_map` runs: in place along the axes of the batch, and as one along others."""
    context, manual, mesh = (
        editor.context,
        shard_map_manual_axes(equation),
        dict(shard_map_mesh_shape(equation)),
    )
    if context.microbatch_axis is not None:
        raise CannotPartition(equation, 'it is in a layer of a pipeline, which runs on one microbatch')
    if [*mesh.items()] != [*context.mesh.shape.items()]:
        raise CannotPartition(
            equation, f'its mesh {mesh} is not that of the step, {dict(context.mesh.shape)}'
        )
    numbers = {axis: i for i, axis in enumerate(context.axes)}
    apart = [axis for axis in manual - numbers.keys() - context.code.auto if mesh[axis] > 1]
    if apart:
        raise CannotPartition(equation, f'devices run the loop around it apart along {sorted(apart)}')
    axes = _Axes(
        {axis: i for axis, i in numbers.items() if axis in manual},
        manual & context.code.auto,
        [i for axis, i in numbers.items() if axis not in manual],
        context.sizes,
        mesh,
        context.axes,
    )
    body, _ = shard_map_jaxpr(equation)
    for value in values:
        if value.has_sum:
            editor.reduce(value, equation)
    atoms, arguments, has_examples = [], list[Argument](), False
    for value, spec, var in zip(values, shard_map_in_specs(equation), body.invars, strict=True):
        kept = editor.shard_map_blocks.get(id(value.var))
        if kept is not None and kept.manual == manual and kept.spec == spec:
            atoms.append(kept.atom)
            arguments.append(Argument(kept.placements))
            has_examples = True
            continue
        before = tuple([value.placements[i] for i in axes.left])
        left = axes.left_placements(before, spec, shape_of(var))
        placements = axes.all(axes.batch_placements(spec, is_state=value.is_state), left)
        atom = editor.convert(value, placements, equation)
        for dim, order in axes.orders(spec).items():
            if not axes.is_direct(order):
                atom = editor.emit(*_block(dim, order), equation, [atom])
        atoms.append(atom)
        arguments.append(Argument(left, value.origin is not None, value.is_zero))
        has_examples |= any(isinstance(x, Shard) and not x.is_state for x in placements)
    partitioner = context.for_shard_map(
        equation, body, arguments, _layouts(editor, equation, axes), axes.left, axes.nested
    )
    backward, specs = editor.is_backward(equation), shard_map_out_specs(equation)
    inner = partitioner.partition(body, arguments, backward=backward, at=equation)
    ends = [
        axes.left_placements(placements, spec, shape_of(var))
        for placements, spec, var in zip(inner.placements, specs, body.outvars, strict=True)
    ]
    kept_results = [axes.kept_inside(*each) for each in zip(inner.placements, ends, specs, strict=True)]
    inside, joins = [x for x, _ in kept_results], [x for _, x in kept_results]
    if inside != [*inner.placements]:
        inner = partitioner.partition(body, arguments, inside, backward=backward, at=equation)
    is_state = not has_examples and any(value.is_state for value in values)
    placed = [
        axes.all(axes.batch_placements(spec, is_state=is_state), end)
        for spec, end in zip(specs, ends, strict=True)
    ]
    outputs = [editor.define(var, x) for var, x in zip(equation.outvars, placed, strict=True)]
    # A result in blocks of another order comes out in a variable of its own.
    blocks = [
        editor.code.var(var, _sizes(shape_of(output.atom), join)) if join else output.atom
        for var, output, join in zip(equation.outvars, outputs, joins, strict=True)
    ]
    if axes.nested:
        nested = [
            [_along(spec, axes.nested) for spec in each] for each in (shard_map_in_specs(equation), specs)
        ]
        written = editor.code.nested_shard_map(
            equation, inner.jaxpr, (nested[0], nested[1]), axes.nested, atoms, blocks
        )
    else:
        written = editor.code.jit_call(equation, inner.jaxpr, atoms, blocks)
    editor.eqns.append(written)
    editor.include(inner, values)
    for i, (output, block, join) in enumerate(zip(outputs, blocks, joins, strict=True)):
        output.is_zero = inner.zeros[i]
        if join:  # what joins blocks is dropped if another shard_map takes them as they are
            editor.shard_map_blocks[id(output.var)] = ShardMapBlocks(block, manual, specs[i], inside[i])
        for dim, order in join.items():
            joined = editor.emit(*_joined(dim, order), equation, [block])
            gather = RedistributeOp('all_gather', tuple(sorted(numbers[n] for n, _, b in order if b)), dim)
            editor.eqns[-1], number = context.collective_writer.with_id(editor.eqns[-1], 'examples')
            editor.collectives.append(
                context.collective_writer.collective(
                    *(gather, equation, (block, joined), None, 'examples'),
                    is_backward=backward,
                    collective_id=number,
                )
            )
            block = joined
        output.atom = block


def _layouts(editor: JaxprEditor, equation: Any, axes: _Axes) -> list[Layout | None]:
    """The layouts that are wanted of the results of the body, along the axes that are left."""
    layouts = list[Layout | None]()
    for var, spec, inside in zip(
        equation.outvars, shard_map_out_specs(equation), shard_map_jaxpr(equation)[0].outvars, strict=True
    ):
        layout = editor.context.reduction_layouts.of(var)
        if layout is not None:
            left = tuple([layout.placements[i] for i in axes.left])
            fits = axes.left_placements(left, spec, shape_of(inside)) == left
            layout = layout._replace(placements=left) if fits else None
        layouts.append(layout)
    return layouts


def _along(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The part of a spec that is along some axes."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    kept = [tuple([name for name in entry if name in axes]) for entry in entries]
    return PartitionSpec(*[names or None for names in kept])


def _sizes(shape: Sequence[int], joined: Mapping[int, _Order]) -> tuple[int, ...]:
    """The shape of a result before its blocks are joined."""
    sizes = [*shape]
    for dim, order in joined.items():
        sizes[dim] //= math.prod(size for _, size, is_batch in order if is_batch)
    return tuple(sizes)


def _block(dim: int, order: _Order) -> tuple[Callable[[Any], Any], Any]:
    """The function that cuts out a block where a spec names axes in another order, and its key."""

    def block(x: Any) -> Any:
        before, sizes, after = x.shape[:dim], [size for _, size, _ in order], x.shape[dim + 1 :]
        blocks = x.reshape(*before, *sizes, x.shape[dim] // math.prod(sizes), *after)
        for i, (name, _, is_batch) in reversed([*enumerate(order)]):
            if is_batch:
                blocks = jax.lax.dynamic_index_in_dim(
                    blocks, jax.lax.axis_index(name), dim + i, keepdims=False
                )
        return blocks.reshape(*before, -1, *after)

    return jax.jit(block), ('block', dim, order)


def _joined(dim: int, order: _Order) -> tuple[Callable[[Any], Any], Any]:
    """The function that gathers blocks where a spec names axes in another order, and its key."""

    def joined(x: Any) -> Any:
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        inside = [size for _, size, is_batch in order if not is_batch]
        blocks = x.reshape(*before, *inside, x.shape[dim] // math.prod(inside), *after)
        for i, (name, _, is_batch) in enumerate(order):
            if is_batch:  # those before it are there already
                blocks = jax.lax.all_gather(blocks, name, axis=dim + i)
        return blocks.reshape(*before, -1, *after)

    def of_keys(keys: Any) -> Any:
        data = joined(jax.random.key_data(keys))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))

    def either(x: Any) -> Any:
        return of_keys(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else joined(x)

    return jax.jit(either), ('joined', dim, order)
