"""The user's `shard_map` inside a step: along the batch axes, its body runs in place.

The step is already manual along the batch axes. The operands are converted to the shards that the specs of
the `shard_map` ask for, and the collectives in its body find their axes. The body is partitioned along the
batch axes that the `shard_map` leaves out; its collectives run along the other axes, for each example alone.
A `shard_map` over other mesh axes, such as a pipeline axis, remains a `shard_map` inside the step.
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
    shards_examples,
    without_outer_axes,
)
from scalax._spmd.values import Argument, CannotPartition, Value


class _ManualAxis(NamedTuple):
    """A manual axis of a `shard_map`.

    Attributes:
        name: its name.
        size: its size.
        is_batch: whether it is a batch axis.
    """

    name: str
    size: int
    is_batch: bool


_DimAxes = tuple[_ManualAxis, ...]
"""The manual axes that shard a dimension, from major to minor."""


class _Axes(NamedTuple):
    """The mesh axes of a `shard_map`.

    Attributes:
        batch: the batch axes that it makes manual, with their indices.
        nested: the other axes that it makes manual.
        remaining: the indices of the batch axes along which its body is partitioned.
        sizes: the sizes of the batch axes.
        mesh: the sizes of all mesh axes.
    """

    batch: dict[str, int]
    nested: frozenset[str]
    remaining: list[int]
    sizes: Sequence[int]
    mesh: dict[str, int]

    def by_dim(self, spec: PartitionSpec) -> dict[int, _DimAxes]:
        """Returns the manual axes of each dimension that a spec shards."""
        axes = {}
        for dim, entry in enumerate(spec):
            names = entry if isinstance(entry, tuple) else (entry,)
            manual = [name for name in names if name in self.batch or name in self.nested]
            if manual:
                axes[dim] = tuple([_ManualAxis(name, self.mesh[name], name in self.batch) for name in manual])
        return axes

    def is_expressible(self, dim_axes: _DimAxes) -> bool:
        """Returns whether placements have this order of axes: batch axes in order, before or after others."""
        is_batch = [axis.is_batch for axis in dim_axes]
        indices = [self.batch[axis.name] for axis in dim_axes if axis.is_batch]
        is_apart = is_batch in (sorted(is_batch), sorted(is_batch, reverse=True))
        return indices == sorted(indices) and is_apart

    def batch_placements(self, spec: PartitionSpec, *, is_state: bool) -> dict[int, Placement]:
        """Returns the placements along the manual batch axes; replicated if they are in another order."""
        placements: dict[int, Placement] = dict.fromkeys(self.batch.values(), REPLICATE)
        for dim, dim_axes in self.by_dim(spec).items():
            if self.is_expressible(dim_axes):
                is_nested_first = not dim_axes[0].is_batch
                outer_axes = tuple([axis.name for axis in dim_axes if is_nested_first and not axis.is_batch])
                shard = Shard(dim, is_state, outer_axes)
                placements |= {self.batch[axis.name]: shard for axis in dim_axes if axis.is_batch}
        return placements

    def in_body(self, placements: Placements, spec: PartitionSpec, shape: Sequence[int]) -> Placements:
        """Returns the placements in the body along the remaining batch axes.

        They are replicated where an axis would have to be the major one, or where shards would be uneven.

        Args:
            placements: the preferred placements outside of it, along these axes.
            spec: the spec of the value.
            shape: the shape of the value in the body.
        """
        axes, result = self.by_dim(spec), list[Placement]()
        for i, placement in zip(self.remaining, placements, strict=True):
            if isinstance(placement, Shard):
                dim_axes = axes.get(placement.dim, ())
                nested = tuple([axis.name for axis in dim_axes if not axis.is_batch])
                is_minor = all(axis.is_batch and self.batch[axis.name] < i for axis in dim_axes)
                if placement.outer_axes == nested and (is_minor or len(nested) == len(dim_axes)):
                    placement = placement._replace(outer_axes=())
                else:
                    placement = REPLICATE
            result.append(placement)
        counts = shard_counts(tuple(result), [self.sizes[i] for i in self.remaining], len(shape))
        uneven = {dim for dim, size in enumerate(shape) if size % counts[dim]}
        return tuple([REPLICATE if isinstance(x, Shard) and x.dim in uneven else x for x in result])

    def outside(self, placements: Placements, spec: PartitionSpec) -> Placements:
        """Returns the placements outside of the body along the remaining batch axes.

        Shards over the manual axes contain the shards in the body, as those of residuals for a backward pass.

        Args:
            placements: the placements in the body, along these axes.
            spec: the spec of the value.
        """
        axes, result = self.by_dim(spec), list[Placement]()
        for placement in placements:
            if isinstance(placement, Shard):
                nested = [axis.name for axis in axes.get(placement.dim, ()) if not axis.is_batch]
                placement = placement._replace(outer_axes=tuple(nested))
            result.append(placement)
        return tuple(result)

    def all_placements(self, batch: dict[int, Placement], remaining: Placements) -> Placements:
        """Returns the placements along all batch axes."""
        placements = batch | dict(zip(self.remaining, remaining, strict=True))
        return tuple([placements[i] for i in range(len(self.sizes))])


def partition_shard_map(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes the body of a `shard_map`: in place along the batch axes, nested along other axes."""
    axes = _axes_of(editor, equation)
    editor.reduce_all(values, equation)
    atoms, arguments, has_examples = _convert_operands(editor, equation, values, axes)
    body, specs = shard_map_jaxpr(equation)[0], shard_map_out_specs(equation)
    partitioner = editor.context.for_shard_map(
        equation, body, arguments, _result_layouts(editor, equation, axes), axes.remaining, axes.nested
    )
    backward = editor.is_backward(equation)
    inner = partitioner.partition(body, arguments, backward=backward, caller=equation)
    body_placements = [
        axes.in_body(axes.outside(placements, spec), spec, shape_of(var))
        for placements, spec, var in zip(inner.placements, specs, body.outvars, strict=True)
    ]
    targets = [*map(axes.outside, body_placements, specs)]
    joins = [
        {dim: dim_axes for dim, dim_axes in axes.by_dim(spec).items() if not axes.is_expressible(dim_axes)}
        for spec in specs
    ]
    if body_placements != [*inner.placements]:
        inner = partitioner.partition(body, arguments, body_placements, backward=backward, caller=equation)
    is_state = not has_examples and any(value.is_state for value in values)
    outputs = [
        editor.define(var, axes.all_placements(axes.batch_placements(spec, is_state=is_state), target))
        for var, spec, target in zip(equation.outvars, specs, targets, strict=True)
    ]
    # The blocks of a result that have to be joined get a variable of their own.
    blocks = [
        editor.code.var(var, _block_shape(shape_of(output.atom), join)) if join else output.atom
        for var, output, join in zip(equation.outvars, outputs, joins, strict=True)
    ]
    if axes.nested:
        nested_specs = [
            [_along(spec, axes.nested) for spec in side] for side in (shard_map_in_specs(equation), specs)
        ]
        written = editor.code.nested_shard_map(
            equation, inner.jaxpr, (nested_specs[0], nested_specs[1]), axes.nested, atoms, blocks
        )
    else:
        written = editor.code.jit_call(equation, inner.jaxpr, atoms, blocks)
    editor.eqns.append(written)
    editor.include(inner, values)
    for i, (output, block, join) in enumerate(zip(outputs, blocks, joins, strict=True)):
        output.is_zero = inner.zeros[i]
        output.atom = _join_blocks(editor, equation, block, join)
        if editor.context.pipelines:  # they only know shards that contain the shards of Auto axes
            editor.convert_in_place(output, tuple(map(without_outer_axes, output.placements)), equation)


def _axes_of(editor: JaxprEditor, equation: Any) -> _Axes:
    """Returns the mesh axes of a `shard_map`. Raises CannotPartition if it is not supported here."""
    context, manual = editor.context, shard_map_manual_axes(equation)
    mesh = dict(shard_map_mesh_shape(equation))
    if context.microbatch_axis is not None:
        raise CannotPartition(equation, 'it is in a pipelined layer, which runs on one microbatch at a time')
    if [*mesh.items()] != [*context.mesh.shape.items()]:
        raise CannotPartition(
            equation, f'its mesh {mesh} differs from the mesh of the step, {dict(context.mesh.shape)}'
        )
    indices = {axis: i for i, axis in enumerate(context.axes)}
    independent = [axis for axis in manual - indices.keys() - context.code.auto if mesh[axis] > 1]
    if independent:
        raise CannotPartition(
            equation, f'devices run the loop around it independently along {sorted(independent)}'
        )
    return _Axes(
        {axis: i for axis, i in indices.items() if axis in manual},
        manual & context.code.auto,
        [i for axis, i in indices.items() if axis not in manual],
        context.sizes,
        mesh,
    )


def _convert_operands(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], axes: _Axes
) -> tuple[list[Any], list[Argument], bool]:
    """Converts the operands of a `shard_map` to the shards that its body takes.

    Returns:
        The atoms, the properties of the arguments of the body, and whether any operand has examples.
    """
    atoms, arguments, has_examples = list[Any](), list[Argument](), False
    body, *_ = shard_map_jaxpr(equation)
    for value, spec, var in zip(values, shard_map_in_specs(equation), body.invars, strict=True):
        preferred = tuple([value.placements[i] for i in axes.remaining])
        remaining = axes.in_body(preferred, spec, shape_of(var))
        batch_placements = axes.batch_placements(spec, is_state=value.is_state)
        placements = axes.all_placements(batch_placements, axes.outside(remaining, spec))
        atom = editor.convert(value, placements, equation)
        for dim, dim_axes in axes.by_dim(spec).items():
            if not axes.is_expressible(dim_axes):
                atom = editor.emit(*_block_function(dim, dim_axes), equation, [atom])
        atoms.append(atom)
        arguments.append(Argument(remaining, value.origin is not None, value.is_zero))
        has_examples |= any(shards_examples(x) for x in placements)
    return atoms, arguments, has_examples


def _join_blocks(editor: JaxprEditor, equation: Any, block: Any, joins: Mapping[int, _DimAxes]) -> Any:
    """Gathers the blocks of a result, and records the collectives."""
    context = editor.context
    for dim, dim_axes in joins.items():
        joined = editor.emit(*_join_function(dim, dim_axes), equation, [block])
        indices = sorted(context.axes.index(axis.name) for axis in dim_axes if axis.is_batch)
        editor.eqns[-1], collective_id = context.collective_writer.with_id(editor.eqns[-1], 'examples')
        editor.collectives.append(
            context.collective_writer.collective(
                RedistributeOp('all_gather', tuple(indices), dim),
                equation,
                (block, joined),
                None,
                'examples',
                is_backward=editor.is_backward(equation),
                collective_id=collective_id,
            )
        )
        block = joined
    return block


def _result_layouts(editor: JaxprEditor, equation: Any, axes: _Axes) -> list[Layout | None]:
    """Returns the layouts of the results of the body, along the remaining batch axes."""
    layouts = list[Layout | None]()
    for var, spec, body_var in zip(
        equation.outvars, shard_map_out_specs(equation), shard_map_jaxpr(equation)[0].outvars, strict=True
    ):
        layout = editor.context.reduction_layouts.of(var)
        if layout is not None:
            remaining = tuple([layout.placements[i] for i in axes.remaining])
            in_body = axes.in_body(remaining, spec, shape_of(body_var))
            fits = axes.outside(in_body, spec) == remaining
            layout = layout._replace(placements=in_body) if fits else None
        layouts.append(layout)
    return layouts


def _along(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns the part of a spec along some axes."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    kept_names = [tuple([name for name in entry if name in axes]) for entry in entries]
    return PartitionSpec(*[names or None for names in kept_names])


def _block_shape(shape: Sequence[int], joins: Mapping[int, _DimAxes]) -> tuple[int, ...]:
    """Returns the shape of a result before its blocks are joined."""
    sizes = [*shape]
    for dim, dim_axes in joins.items():
        sizes[dim] //= math.prod(axis.size for axis in dim_axes if axis.is_batch)
    return tuple(sizes)


def _block_function(dim: int, dim_axes: _DimAxes) -> tuple[Callable[[Any], Any], Any]:
    """Returns the function that takes a block whose axes are not in mesh order, and its cache key."""

    def block(x: Any) -> Any:
        before, sizes, after = x.shape[:dim], [axis.size for axis in dim_axes], x.shape[dim + 1 :]
        blocks = x.reshape(*before, *sizes, x.shape[dim] // math.prod(sizes), *after)
        for i, axis in reversed([*enumerate(dim_axes)]):
            if axis.is_batch:
                blocks = jax.lax.dynamic_index_in_dim(
                    blocks, jax.lax.axis_index(axis.name), dim + i, keepdims=False
                )
        return blocks.reshape(*before, -1, *after)

    return jax.jit(block), ('block', dim, dim_axes)


def _join_function(dim: int, dim_axes: _DimAxes) -> tuple[Callable[[Any], Any], Any]:
    """Returns the function that joins blocks whose axes are not in mesh order, and its cache key."""

    def join(x: Any) -> Any:
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        inner_sizes = [axis.size for axis in dim_axes if not axis.is_batch]
        blocks = x.reshape(*before, *inner_sizes, x.shape[dim] // math.prod(inner_sizes), *after)
        for i, axis in enumerate(dim_axes):
            if axis.is_batch:  # the dimensions of the axes before it exist by now
                blocks = jax.lax.all_gather(blocks, axis.name, axis=dim + i)
        return blocks.reshape(*before, -1, *after)

    def join_keys(keys: Any) -> Any:
        data = join(jax.random.key_data(keys))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))

    def join_any(x: Any) -> Any:
        return join_keys(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else join(x)

    return jax.jit(join_any), ('joined', dim, dim_axes)
