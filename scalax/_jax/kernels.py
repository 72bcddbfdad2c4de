"""Accessors for equations of kernels: Pallas kernels, and cuDNN attention.

For Pallas kernels these are the grid, the blocks that each grid step reads and writes, and effects. All of
that relies on the parameters of `pallas_call`, in all supported versions: *grid_mapping* (with *grid*,
*block_mappings*, *vmapped_dims*, *num_index_operands* and *scratch_avals*), *jaxpr*, *input_output_aliases*,
*compiler_params*, *out_avals*, *cost_estimate* and *interpret*.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from scalax._jax.equations import all_equations, open_jaxpr

# Primitives that return the index of a grid step, or the number of steps.
_GRID_INDICES = frozenset({'program_id', 'num_programs', 'axis_index'})
_PARALLEL = ('parallel', 'core_parallel')

ATTENTION = frozenset(
    f'dot_product_attention_{name}{wrapper}'
    for name in ('fwd', 'bwd', 'fp8_fwd', 'fp8_bwd')
    for wrapper in ('', '_wrapper')
)
"""The names of the primitives of cuDNN attention; those with ``bwd`` are its gradient."""


def attention_sizes(equation: Any) -> tuple[int, int, int]:
    """Returns the number of (query, key) pairs of cuDNN attention, and the head sizes of keys and of values.

    Relies on queries, keys and values being the first operands, and on the parameter *layout*, which is 0 if
    the dimension of heads follows that of positions.
    """
    query, key, value = (var.aval.shape for var in equation.invars[:3])
    return math.prod(query[:3]) * key[2 if equation.params['layout'] else 1], query[3], value[3]


def attention_heads_dim(equation: Any) -> int:
    """Returns the dimension of heads in queries, keys and values of cuDNN attention.

    Relies on what `attention_sizes` relies on.
    """
    return 1 if equation.params['layout'] else 2


def has_attention_dropout(equation: Any) -> bool:
    """Returns whether cuDNN attention has dropout. Relies on *dropout_rate*."""
    return equation.params['dropout_rate'] != 0


def is_attention_gradient(equation: Any) -> bool:
    """Returns whether an equation is the gradient of cuDNN attention. Relies on ``bwd`` in its name."""
    return 'bwd' in equation.primitive.name


def kernel_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr of one grid step."""
    return open_jaxpr(equation.params['jaxpr'])


def is_interpreted(equation: Any) -> bool:
    """Returns whether a kernel runs as ordinary code, for tests. The compiler can partition it then."""
    return bool(equation.params['interpret'])


def grid(equation: Any) -> Sequence[Any]:
    """Returns the number of steps along each dimension of the grid; not an int if an operand specifies it."""
    return equation.params['grid_mapping'].grid


def count_index_operands(equation: Any) -> int:
    """Returns the number of prefetched scalar operands, which select blocks and which every step gets.

    Relies on them being the first operands, and the first arguments of the kernel.
    """
    return equation.params['grid_mapping'].num_index_operands


def block_mappings_of(equation: Any) -> Sequence[Any]:
    """Returns the block mappings of the operands after those of `count_index_operands`, and of the results.

    Other operands without one are sizes of the grid.
    """
    return equation.params['grid_mapping'].block_mappings


def array_shape(block: Any) -> tuple[int, ...]:
    """Returns the shape of the array that a block mapping splits into blocks."""
    return tuple(block.array_aval.shape)


def grid_dims(block: Any) -> dict[int, int]:
    """Returns a dictionary: dimension of an array -> the grid dimension whose step is the index of the block.

    Relies on the index map being a jaxpr whose first arguments are the steps.
    """
    index_map = open_jaxpr(block.index_map_jaxpr)
    steps = {id(var): step for step, var in enumerate(index_map.invars)}
    return {
        dim: steps[id(atom)]
        for dim, atom in enumerate(index_map.outvars)
        if id(atom) in steps and _block_size(block.block_shape[dim]) is not None
    }


def _block_size(size: Any) -> int | None:
    """Returns the size of a block along a dimension; None if its indices are not indices of blocks."""
    from jax.experimental import pallas  # it is loaded: there is a kernel

    if size is None or isinstance(size, pallas.Squeezed):
        return 1
    if isinstance(size, pallas.Blocked):
        return size.block_size
    return size if isinstance(size, int) else None


def can_split_grid(equation: Any, step: int, shards: int) -> bool:
    """Returns whether devices may share the steps of one grid dimension.

    Each block along this dimension must be read and written by its own step, every written array must have
    such blocks, and the kernel must do the same in each step, independent of earlier steps.

    Args:
        equation: the kernel.
        step: the grid dimension.
        shards: the number of devices.
    """
    num_scalars, mappings = count_index_operands(equation), block_mappings_of(equation)
    count = grid(equation)[step]
    if not isinstance(count, int) or count % shards:
        return False
    for operand, result in equation.params['input_output_aliases']:
        results = mappings[len(equation.invars) - num_scalars :]
        if operand < num_scalars or grid_dims(mappings[operand - num_scalars]) != grid_dims(results[result]):
            return False
    written = _written(equation)
    if any(i < num_scalars for i in written):
        return False
    return all(
        _walks_apart(block, step, count, i in written) for i, block in enumerate(mappings, num_scalars)
    ) and _steps_are_apart(equation, step)


def _walks_apart(block: Any, step: int, count: int, is_written: bool) -> bool:
    """Returns whether each step of a grid dimension has its own block, or all steps have the same blocks."""
    index_map = open_jaxpr(block.index_map_jaxpr)
    dims = [dim for dim, grid_dim in grid_dims(block).items() if grid_dim == step]
    uses = [
        atom
        for atoms in (index_map.outvars, *(eqn.invars for eqn in index_map.eqns))
        for atom in atoms
        if not isinstance(atom, Literal) and atom is index_map.invars[step]
    ]
    if len(uses) != len(dims) or len(dims) > 1 or (not dims and is_written):
        return False
    if any(eqn.primitive.name in _GRID_INDICES for eqn in index_map.eqns):
        return False
    sizes = {dim: _block_size(block.block_shape[dim]) for dim in dims}
    return all(size is not None and size * count == array_shape(block)[dim] for dim, size in sizes.items())


def _written(equation: Any) -> set[int]:
    """Returns the indices of the arguments that a kernel writes to: results, and operands updated in place.

    Relies on the effects of its jaxpr naming an argument: by *input_index* until JAX 0.11, by *input*, the
    variable, since. An effect called "Read" does not write.
    """
    kernel = kernel_jaxpr(equation)
    indices = {id(var): i for i, var in enumerate(kernel.invars)}
    written = {*range(len(equation.invars), len(equation.invars) + len(equation.outvars))}
    for effect in kernel.effects:
        if getattr(effect, 'name', 'Read') != 'Read':
            written.add(getattr(effect, 'input_index', indices.get(id(getattr(effect, 'input', None)), -1)))
    return written


def _steps_are_apart(equation: Any, step: int) -> bool:
    """Returns whether a kernel does the same in each step of a grid dimension, whatever came before."""
    mapping = equation.params['grid_mapping']
    if step in mapping.vmapped_dims:
        return True
    # Grid indices in a kernel do not count the dimensions that jax.vmap adds.
    kernel_dims = [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]
    kernel_dim = kernel_dims.index(step)
    for eqn in all_equations(kernel_jaxpr(equation)):
        name = eqn.primitive.name
        if name in _GRID_INDICES and eqn.params.get('axis', kernel_dim) == kernel_dim:
            return False
        if name.startswith('prng_'):  # steps share its state
            return False
    # Scratch memory keeps its values for the next step, unless the steps are declared parallel.
    semantics = getattr(equation.params['compiler_params'], 'dimension_semantics', None) or ()
    has_semantics = len(semantics) == len(kernel_dims)
    is_parallel = (
        has_semantics and getattr(semantics[kernel_dim], 'value', semantics[kernel_dim]) in _PARALLEL
    )
    return not mapping.scratch_avals or is_parallel


def split_grid_params(equation: Any, shards: Mapping[int, int]) -> dict[str, Any]:
    """Returns the parameters of a kernel that differ for local shards of its operands.

    Args:
        equation: the kernel.
        shards: grid dimension -> the number of devices that share its steps.
    """
    params, mappings = equation.params, []
    for block in block_mappings_of(equation):
        shape = list(array_shape(block))
        for dim, step in grid_dims(block).items():
            shape[dim] //= shards.get(step, 1)
        mappings.append(dataclasses.replace(block, array_aval=block.array_aval.update(shape=tuple(shape))))
    steps = tuple(size // shards.get(step, 1) for step, size in enumerate(grid(equation)))
    local_grid = dataclasses.replace(params['grid_mapping'], grid=steps, block_mappings=tuple(mappings))
    results = tuple(
        aval.update(shape=block.array_aval.shape)
        for aval, block in zip(params['out_avals'], mappings[-len(params['out_avals']) :], strict=True)
    )
    changed: dict[str, Any] = {'grid_mapping': local_grid, 'out_avals': results}
    cost = params['cost_estimate']
    if cost is not None:
        devices = math.prod(shards.values())
        counts = {name: value // devices for name, value in vars(cost).items() if isinstance(value, int)}
        changed['cost_estimate'] = dataclasses.replace(cost, **counts)
    return changed


def interpreted_params(
    equation: Any, changed: Mapping[str, Any], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns the parameters of an interpreted kernel with other jaxprs of its steps and index maps.

    Args:
        equation: the kernel.
        changed: the other parameters that change.
        change: returns the replacement of a jaxpr.
    """
    params = {**equation.params, **changed}
    mapping = params['grid_mapping']
    mappings = [
        dataclasses.replace(block, index_map_jaxpr=change(block.index_map_jaxpr))
        for block in mapping.block_mappings
    ]
    mapping = dataclasses.replace(mapping, block_mappings=tuple(mappings))
    return {**changed, 'jaxpr': change(params['jaxpr']), 'grid_mapping': mapping}
