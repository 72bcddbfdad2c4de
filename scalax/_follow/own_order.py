"""Sorts of rows that come back, as of tokens by expert: each device sorts its own rows.

Sorted, the rows of all devices are mixed, and the compiler gathers them. The usual remedy is a `shard_map`
around all that is done with them. Here only the order changes: that of a device's own rows, device by device.
Then what takes rows in this order, multiplies them in groups and puts them back finds them on the device, and
runs there, each equation in a `shard_map`. `orders` shows where the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._follow.follow import follow
from scalax._follow.ragged import on_own_rows
from scalax._follow.trail import LOST, Trail, Trails, put
from scalax._follow.types import Arguments
from scalax._jax.equations import opened, ragged_dim, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, added_equation, bound, equation_of, flattened, replaced
from scalax._jaxprs.orders import CONSTANTS, Block, block_of


def with_own_order(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Any:
    """The jaxpr whose devices sort their own rows, where that is certain to give the same; else the same one.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    flat = flattened(jaxpr, CONSTANTS)
    # Trails tell which sorts mix the rows of devices. Whether another order will do, `orders` tells.
    ordered = follow(flat, arguments, mesh).ordered
    trails = Trails(dict(mesh.shape), arguments.batch_axes)
    found = _OwnOrder(ordered, trails, mesh).jaxpr(flat)
    return jaxpr if found is flat else found


class _OwnOrder(Rewriter):
    """Rewrites the blocks of sorts."""

    def __init__(
        self, ordered: Mapping[str, Mapping[Any, Sequence[Trail]]], trails: Trails, mesh: Mesh | AbstractMesh
    ) -> None:
        super().__init__(lambda equation: equation)
        self._sorts, self._products = ordered['sort'], ordered['ragged_dot_general']
        self._trails, self._mesh = trails, mesh

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, and those inside it."""
        changed: dict[Any, list[Any]] = {}
        for equation in opened(jaxpr).eqns:
            block = {} if equation in changed else self._block(jaxpr, equation)
            if block.keys().isdisjoint(changed):
                changed.update(block)
        if changed:
            every = [each for equation in opened(jaxpr).eqns for each in changed.get(equation, [equation])]
            jaxpr = replaced(jaxpr, eqns=every)
        return super().jaxpr(jaxpr)

    def _block(self, jaxpr: Any, sort: Any) -> Mapping[Any, list[Any]]:
        """The equations that stand for those of the block of a sort; none if the order stays.

        Nor are there any of other equations.
        """
        axes = next((axes for trail in self._sorts.get(sort, ())[:1] for axes in trail), ())
        if not self._trails.batch_axes.intersection(axes):
            return {}
        block = block_of(jaxpr, sort, self._trails.shards(axes))
        if block is None:
            return {}
        sizes = added_equation(self._sizes(block, axes), sort, [block.keys])
        changed = {
            equation: [self._on_own_rows(equation, block, axes)]
            for equation in opened(jaxpr).eqns
            if equation in block.own
        }
        changed[sort].append(sizes)
        for product in block.products:
            left, *others = self._products.get(product, [LOST] * 3)
            rows = put(left or ((),) * len(shape_of(product.invars[0])), ragged_dim(product), axes)
            own = on_own_rows(product, [rows, *others], self._trails, self._mesh, sizes.outvars[0])
            changed[product] = [own]
        return changed

    def _sizes(self, block: Block, axes: tuple[str, ...]) -> Callable[[Any], Any]:
        """Counts the rows of each device in each group."""

        def here(keys: Any) -> Any:
            return jnp.sum(keys[:, None] == jnp.arange(block.groups, dtype=keys.dtype), 0, jnp.int32)[None]

        return self._mapped(here, axes, self._mesh.axis_names)

    def _on_own_rows(self, equation: Any, block: Block, axes: tuple[str, ...]) -> Any:
        """A sort, or an equation that takes or puts rows by number, which each device runs on its own rows.

        Rows are numbered over all devices; less the number of its first row, these are the device's own.

        Where rows are put back, other axes may shard their columns, which are then gathered behind it: rows
        are fewer there. In front of products in groups they are whole.
        """

        def here(*operands: Any) -> Any:
            if primitive_name(equation) == 'sort':
                return bound(equation, *operands)
            x, numbers, *updates = operands
            first = jax.lax.axis_index(axes) * len(x)
            return bound(equation, x, numbers - first.astype(numbers.dtype), *updates)

        is_back = id(equation.outvars[0]) not in block.in_order
        return equation_of(self._mapped(here, axes, axes if is_back else self._mesh.axis_names), equation)

    def _mapped(
        self, here: Callable[..., Any], axes: tuple[str, ...], manual: Sequence[str]
    ) -> Callable[..., Any]:
        spec = PartitionSpec(axes)
        return jax.shard_map(
            here, mesh=self._mesh, in_specs=spec, out_specs=spec, axis_names={*manual}, check_vma=False
        )
