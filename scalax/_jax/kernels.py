"""What equations of kernels hold: those of Pallas, and the sizes of cuDNN's attention.

Of Pallas' kernels these are their grid, the blocks that each step reads and writes, and effects. All of that
relies on the parameters of `pallas_call`, in all supported versions: *grid_mapping* (with *grid*,
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

# What tells a kernel its step, or how many there are.
_NUMBERS = frozenset({'program_id', 'num_programs', 'axis_index'})
_PARALLEL = ('parallel', 'core_parallel')

ATTENTION = frozenset(
    f'dot_product_attention_{name}{wrapper}'
    for name in ('fwd', 'bwd', 'fp8_fwd', 'fp8_bwd')
    for wrapper in ('', '_wrapper')
)
"""The names of primitives that are attention by cuDNN; those with ``bwd`` are its gradient."""


def attention_sizes(equation: Any) -> tuple[int, int, int]:
    """Of attention by cuDNN: the pairs of a query and a key, and the sizes of a head of keys and of values.

    Relies on queries, keys and values being the first operands, and on the parameter *layout*, which is 0
    where heads come behind positions.
    """
    query, key, value = (var.aval.shape for var in equation.invars[:3])
    return math.prod(query[:3]) * key[2 if equation.params['layout'] else 1], query[3], value[3]


def attention_heads_dim(equation: Any) -> int:
    """The dimension of heads in queries, keys and values of attention by cuDNN, whose first one is the batch.

    Relies on what `attention_sizes` relies on.
    """
    return 1 if equation.params['layout'] else 2


def has_attention_dropout(equation: Any) -> bool:
    """Whether attention by cuDNN drops some of its weights by chance. Relies on *dropout_rate*."""
    return equation.params['dropout_rate'] != 0


def is_attention_gradient(equation: Any) -> bool:
    """Whether attention by cuDNN is its gradient. Relies on what `ATTENTION` says."""
    return 'bwd' in equation.primitive.name


def kernel_jaxpr(equation: Any) -> Any:
    """The jaxpr of one step."""
    return open_jaxpr(equation.params['jaxpr'])


def is_interpreted(equation: Any) -> bool:
    """Whether a kernel runs as ordinary code, for tests; the compiler partitions it then."""
    return bool(equation.params['interpret'])


def grid(equation: Any) -> Sequence[Any]:
    """How many steps there are along each dimension of the grid; no int where an operand says it."""
    return equation.params['grid_mapping'].grid


def count_index_operands(equation: Any) -> int:
    """How many operands, the first ones, every step gets whole: numbers that choose blocks.

    They are prefetched scalars. Relies on them being in front of all others, of a kernel's arguments too.
    """
    return equation.params['grid_mapping'].num_index_operands


def block_mappings_of(equation: Any) -> Sequence[Any]:
    """The block mappings of the operands after those of `count_index_operands`, and of the results.

    Other operands without one are sizes of the grid.
    """
    return equation.params['grid_mapping'].block_mappings


def array_shape(block: Any) -> tuple[int, ...]:
    """The shape of the whole array of a block."""
    return tuple(block.array_aval.shape)


def grid_dims(block: Any) -> dict[int, int]:
    """Dimension of an array -> the dimension of the grid whose step is the number of the block.

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
    """The elements of a block along a dimension; None if its numbers are not those of blocks."""
    from jax.experimental import pallas  # it is loaded: there is a kernel

    if size is None or isinstance(size, pallas.Squeezed):
        return 1
    if isinstance(size, pallas.Blocked):
        return size.block_size
    return size if isinstance(size, int) else None


def can_split_grid(equation: Any, step: int, shards: int) -> bool:
    """Whether the steps of one dimension of the grid may be dealt to so many devices.

    Each block of an array that this dimension walks over is read and written by its own step, what is written
    is walked over, and the kernel does the same at each step, whatever came before it.
    """
    whole, given = count_index_operands(equation), block_mappings_of(equation)
    count = grid(equation)[step]
    if not isinstance(count, int) or count % shards:
        return False
    for operand, result in equation.params['input_output_aliases']:
        results = given[len(equation.invars) - whole :]
        if operand < whole or grid_dims(given[operand - whole]) != grid_dims(results[result]):
            return False
    written = _written(equation)
    if any(place < whole for place in written):
        return False
    return all(
        _walks_apart(block, step, count, i in written) for i, block in enumerate(given, whole)
    ) and _steps_are_apart(equation, step)


def _walks_apart(block: Any, step: int, count: int, is_written: bool) -> bool:
    """Whether each step of one dimension of the grid has a block of its own, or all have the same ones."""
    index_map = open_jaxpr(block.index_map_jaxpr)
    dims = [dim for dim, each in grid_dims(block).items() if each == step]
    uses = [
        atom
        for atoms in (index_map.outvars, *(each.invars for each in index_map.eqns))
        for atom in atoms
        if not isinstance(atom, Literal) and atom is index_map.invars[step]
    ]
    if len(uses) != len(dims) or len(dims) > 1 or (not dims and is_written):
        return False
    if any(each.primitive.name in _NUMBERS for each in index_map.eqns):
        return False
    sizes = {dim: _block_size(block.block_shape[dim]) for dim in dims}
    return all(size is not None and size * count == array_shape(block)[dim] for dim, size in sizes.items())


def _written(equation: Any) -> set[int]:
    """The arguments that a kernel writes to, by number: results, and operands that it changes in place.

    Relies on effects of its jaxpr, of which that of reading has the name "Read", naming an argument: by
    *input_index* until JAX 0.11, by *input*, the variable, since.
    """
    kernel = kernel_jaxpr(equation)
    places = {id(var): place for place, var in enumerate(kernel.invars)}
    found = {*range(len(equation.invars), len(equation.invars) + len(equation.outvars))}
    for effect in kernel.effects:
        if getattr(effect, 'name', 'Read') != 'Read':
            found.add(getattr(effect, 'input_index', places.get(id(getattr(effect, 'input', None)), -1)))
    return found


def _steps_are_apart(equation: Any, step: int) -> bool:
    """Whether a kernel does the same at each step of a dimension of the grid, whatever came before it."""
    mapping = equation.params['grid_mapping']
    if step in mapping.vmapped_dims:
        return True
    # A kernel does not count the dimensions that jax.vmap adds.
    counted = [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]
    number = counted.index(step)
    for each in all_equations(kernel_jaxpr(equation)):
        name = each.primitive.name
        if name in _NUMBERS and each.params.get('axis', number) == number:
            return False
        if name.startswith('prng_'):  # its state goes from step to step
            return False
    # What is left in scratch memory is there in the next step, unless it is said that steps are parallel.
    said = getattr(equation.params['compiler_params'], 'dimension_semantics', None) or ()
    parallel = len(said) == len(counted) and getattr(said[number], 'value', said[number]) in _PARALLEL
    return not mapping.scratch_avals or parallel


def split_grid_params(equation: Any, shards: Mapping[int, int]) -> dict[str, Any]:
    """Returns the parameters of a kernel that change for a part of its operands.

    Args:
        equation: the kernel.
        shards: dimension of the grid -> into how many parts its steps are dealt.
    """
    params, given = equation.params, []
    for block in block_mappings_of(equation):
        shape = list(array_shape(block))
        for dim, step in grid_dims(block).items():
            shape[dim] //= shards.get(step, 1)
        given.append(dataclasses.replace(block, array_aval=block.array_aval.update(shape=tuple(shape))))
    steps = tuple(size // shards.get(step, 1) for step, size in enumerate(grid(equation)))
    part = dataclasses.replace(params['grid_mapping'], grid=steps, block_mappings=tuple(given))
    results = tuple(
        aval.update(shape=block.array_aval.shape)
        for aval, block in zip(params['out_avals'], given[-len(params['out_avals']) :], strict=True)
    )
    changed: dict[str, Any] = {'grid_mapping': part, 'out_avals': results}
    cost = params['cost_estimate']
    if cost is not None:
        devices = math.prod(shards.values())
        counts = {name: value // devices for name, value in vars(cost).items() if isinstance(value, int)}
        changed['cost_estimate'] = dataclasses.replace(cost, **counts)
    return changed


def interpreted_params(
    equation: Any, changed: Mapping[str, Any], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns the parameters of an interpreted kernel with other jaxprs of steps and of numbers of blocks.

    Args:
        equation: the kernel.
        changed: those of its parameters that change otherwise.
        change: gives a jaxpr in place of one.
    """
    params = {**equation.params, **changed}
    mapping = params['grid_mapping']
    mappings = [
        dataclasses.replace(block, index_map_jaxpr=change(block.index_map_jaxpr))
        for block in mapping.block_mappings
    ]
    mapping = dataclasses.replace(mapping, block_mappings=tuple(mappings))
    return {**changed, 'jaxpr': change(params['jaxpr']), 'grid_mapping': mapping}
