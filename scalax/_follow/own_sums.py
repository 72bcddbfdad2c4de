"""Loops that add up over microbatches: each device adds up its own examples, and devices once after the loop.

Where parameters are replicated (DDP), the compiler sums the gradients of each microbatch over devices. It can
put that after the loop only where a round does no more than add what it reduces: not for the layers of a
scan, nor where gradients are cast to the dtype of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._follow.trail import Trail, axes_of
from scalax._follow.types import Arguments
from scalax._jax.equations import equations, loop_of, opened, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, equation_of
from scalax._jaxprs.other_rows import Known, OnOtherRows
from scalax._jaxprs.rows import SUM, Fact, Refused, Rows, RowsOf

# Each device would draw for the examples of all devices.
_DRAW = frozenset({'random_bits', 'random_gamma', 'threefry2x32', 'rng_bit_generator'})
# JAX cannot compile these where a device runs alone, even if they take parameters only.
_OF_ALL_DEVICES = frozenset({'shard_map', 'custom_partitioning', 'pure_callback'})


def with_own_sums(
    jaxpr: Any, loops: Mapping[Any, Sequence[Trail]], arguments: Arguments, mesh: Mesh | AbstractMesh
) -> Any:
    """The jaxpr whose loops over microbatches sum over devices once; the same one if there are none.

    Args:
        jaxpr: the jaxpr.
        loops: its `scan` equations, and the trails of their operands.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    stored = {axis for trail in arguments.stored for axis in axes_of(trail)}
    axes = {axis for axis in arguments.batch_axes - stored if mesh.shape[axis] > 1}

    def change(equation: Any) -> Any:
        return _summed_once(equation, loops[equation], axes, mesh) if equation in loops else equation

    return Rewriter(change).jaxpr(jaxpr) if axes else jaxpr


def _summed_once(equation: Any, trails: Sequence[Trail], axes: set[str], mesh: Mesh | AbstractMesh) -> Any:
    """A `scan` that sums over devices once; the same one if it does not only add up over examples."""
    loop, invars = loop_of(equation), equation.invars
    over = [[(dim, by) for dim, by in enumerate(trail) if axes & {*by}] for trail in trails]
    counts = {(shape_of(invars[i])[dim], by) for i, each in enumerate(over) for dim, by in each}
    others = any(over[: loop.constants + loop.carried]) or any(
        each[0][0] == 0 or each[1:] for each in over if each
    )
    stays = not (_DRAW | _OF_ALL_DEVICES).isdisjoint(map(primitive_name, equations(loop.body)))
    if len(counts) != 1 or others or stays or opened(loop.body).effects:
        return equation
    [(count, by)] = counts
    manual = tuple(axis for axis in by if axis in axes)
    devices = math.prod(mesh.shape[axis] for axis in manual)
    rows, facts = RowsOf(count), [Rows(each[0][0]) if each else None for each in over]
    try:
        found = rows.equation(equation, facts)
    except Refused:  # what is computed of all examples stays so
        return equation
    is_sum = SUM in found and not any(isinstance(fact, Rows) for fact in found[: loop.carried])
    if not is_sum or manual != by[: len(manual)] or count % devices:
        return equation

    def spec(fact: Fact) -> PartitionSpec:
        before = [None] * fact.dim if isinstance(fact, Rows) else []
        return PartitionSpec() if fact is None else PartitionSpec(*before, manual)

    def share(x: Any, fact: Fact) -> Any:
        """What a device gets of what is the same for all examples; of a term of a sum the first gets all."""
        device = jax.lax.axis_index(manual)
        if not isinstance(fact, Rows):
            return jnp.where(device == 0, x, jnp.zeros_like(x))
        size = x.shape[fact.dim] // devices
        return jax.lax.dynamic_slice_in_dim(x, device * size, size, fact.dim)

    def own(*operands: Any) -> list[Any]:
        on_own = OnOtherRows(rows, count // devices, share)
        results = on_own.scan(equation, [*map(Known, operands, facts)], found)
        return [x[None] if fact == SUM else x for x, fact in zip(results, found, strict=True)]

    def summed(*operands: Any) -> list[Any]:
        given, out = tuple(map(spec, facts)), [*map(spec, found)]
        run = jax.shard_map(
            own, mesh=mesh, in_specs=given, out_specs=out, axis_names={*manual}, check_vma=False
        )
        pairs = zip(run(*operands), found, strict=True)
        return [x.sum(0, dtype=x.dtype) if fact == SUM else x for x, fact in pairs]

    return equation_of(jax.jit(summed), equation)
