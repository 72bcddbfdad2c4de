"""Kernels of Pallas: each device runs a kernel on its own rows, where the grid shows that rows are apart.

The compiler cannot partition a kernel; JAX refuses one that sees sharded arrays. Experts write a `shard_map`
around it. Here that is done where it changes nothing: a dimension of the grid walks over blocks of rows,
each block is read and written by its own step, and the kernel does not ask which step it is. Then each
device takes some of the steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.constraint import closed_spec_of
from scalax._follow.jaxprs import equations, opened, shape_of
from scalax._follow.trail import Trail, of_dims

# What tells a kernel its step, or how many there are.
_NUMBERS = frozenset({'program_id', 'num_programs', 'axis_index'})
_PARALLEL = ('parallel', 'core_parallel')


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """How the steps of a kernel are dealt to devices.

    Attributes:
        equation: the kernel.
        over: dimension of its grid -> the mesh axes over which the steps are.
        mesh: a mesh of Auto axes.
    """

    equation: Any
    over: Mapping[int, tuple[str, ...]]
    mesh: Mesh | AbstractMesh

    @property
    def results(self) -> list[Trail]:
        """The trails of the results; what is not in them is whole."""
        return self._trails()[len(self.equation.invars) :]

    def equation_on_rows(self) -> Any:
        """The equation of a `shard_map` in which each device takes its steps."""
        count, trails = len(self.equation.invars), self._trails()
        specs = [
            closed_spec_of(trail, len(block.array_aval.shape))
            for trail, block in zip(trails, self._blocks, strict=True)
        ]
        mapped = jax.shard_map(
            self.on_device,
            mesh=self.mesh,
            in_specs=tuple(specs[:count]),
            out_specs=specs[count:],
            check_vma=False,
        )
        operands, results = self.equation.invars, self.equation.outvars
        shapes = [jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype) for atom in operands]
        [found] = opened(jax.make_jaxpr(mapped)(*shapes)).eqns
        return found.replace(invars=operands, outvars=results, source_info=self.equation.source_info)

    def on_device(self, *operands: Any) -> Any:
        """The results of one device, of its parts of the operands."""
        return self.equation.primitive.bind(*operands, **_params_of_part(self.equation, self.shards))

    @property
    def shards(self) -> dict[int, int]:
        """Dimension of the grid -> over how many devices its steps are."""
        return {step: math.prod(self.mesh.shape[axis] for axis in axes) for step, axes in self.over.items()}

    @property
    def _blocks(self) -> Sequence[Any]:
        return self.equation.params['grid_mapping'].block_mappings

    def _trails(self) -> list[Trail]:
        return [
            of_dims(
                {dim: self.over[step] for dim, step in _walked(block).items() if step in self.over},
                len(block.array_aval.shape),
            )
            for block in self._blocks
        ]


def split_of(
    equation: Any, trails: Sequence[Trail], mesh: Mesh | AbstractMesh, has_rows: Callable[[Trail], bool]
) -> Split | None:
    """How the steps of a kernel are dealt to the devices that have its operands; None if they may not be.

    Args:
        equation: the kernel.
        trails: those of its operands.
        mesh: a mesh of Auto axes.
        has_rows: tells whether some dimension of a trail holds rows of the batch.
    """
    blocks = equation.params['grid_mapping'].block_mappings
    # Operands that are no blocks are sizes of the grid, or numbers that choose blocks.
    if len(blocks) != len(equation.invars) + len(equation.outvars):
        return None
    operands = zip(blocks[: len(equation.invars)], trails, strict=True)
    axes = _axes_of_steps(sorted(operands, key=lambda operand: not has_rows(operand[1])))
    every = Split(equation, axes, mesh)
    over = {step: axes[step] for step, shards in every.shards.items() if _may_split(equation, step, shards)}
    return Split(equation, over, mesh) if over else None


def _axes_of_steps(operands: Sequence[tuple[Any, Trail]]) -> dict[int, tuple[str, ...]]:
    """Dimension of the grid -> the mesh axes over the dimensions of operands that it walks over.

    The first operand that has some decides.
    """
    found: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for block, trail in operands:
        walked = _walked(block)
        for dim, axes in enumerate(trail):
            step = walked.get(dim)
            if axes and step is not None and step not in found and used.isdisjoint(axes):
                found[step] = axes
                used.update(axes)
    return found


def _walked(block: Any) -> dict[int, int]:
    """Dimension of an array -> the dimension of the grid whose step is the number of the block."""
    index_map = opened(block.index_map_jaxpr)
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


def _may_split(equation: Any, step: int, shards: int) -> bool:
    """Whether the steps of one dimension of the grid may be dealt to devices."""
    grid = equation.params['grid_mapping']
    if not isinstance(grid.grid[step], int) or grid.grid[step] % shards or grid.num_index_operands:
        return False
    blocks, written = grid.block_mappings, _written(equation)
    for operand, result in equation.params['input_output_aliases']:
        if _walked(blocks[operand]) != _walked(blocks[len(equation.invars) + result]):
            return False
    for i, block in enumerate(blocks):
        index_map = opened(block.index_map_jaxpr)
        walked = [dim for dim, each in _walked(block).items() if each == step]
        var = index_map.invars[step]
        uses = [
            atom
            for atoms in (index_map.outvars, *(each.invars for each in index_map.eqns))
            for atom in atoms
            if not isinstance(atom, Literal) and atom is var
        ]
        if len(uses) != len(walked) or len(walked) > 1 or (not walked and i in written):
            return False
        if any(each.primitive.name in _NUMBERS for each in index_map.eqns):
            return False
        for dim in walked:
            size = _block_size(block.block_shape[dim])
            if size is None or size * grid.grid[step] != block.array_aval.shape[dim]:
                return False
    return _steps_are_apart(equation, step)


def _written(equation: Any) -> set[int]:
    """The blocks that a kernel writes to, by number: results, and operands that it changes in place."""
    kernel = opened(equation.params['jaxpr'])
    places = {id(var): place for place, var in enumerate(kernel.invars)}
    found = {*range(len(equation.invars), len(equation.invars) + len(equation.outvars))}
    for effect in kernel.effects:
        if getattr(effect, 'name', 'Read') != 'Read':
            # A number until JAX 0.11, the variable since.
            found.add(getattr(effect, 'input_index', places.get(id(getattr(effect, 'input', None)), -1)))
    return found


def _steps_are_apart(equation: Any, step: int) -> bool:
    """Whether a kernel does the same at each step of a dimension of the grid, whatever came before it."""
    grid, params = equation.params['grid_mapping'], equation.params
    if step in grid.vmapped_dims:
        return True
    # A kernel does not count the dimensions that jax.vmap adds.
    counted = [dim for dim in range(len(grid.grid)) if dim not in grid.vmapped_dims]
    number = counted.index(step)
    for each in equations(params['jaxpr']):
        name = each.primitive.name
        if name in _NUMBERS and each.params.get('axis', number) == number:
            return False
        if name.startswith('prng_'):  # its state goes from step to step
            return False
    # What is left in scratch memory is there in the next step, unless it is said that steps are parallel.
    said = getattr(params['compiler_params'], 'dimension_semantics', None) or ()
    parallel = len(said) == len(counted) and getattr(said[number], 'value', said[number]) in _PARALLEL
    return not grid.scratch_avals or parallel


def _params_of_part(equation: Any, shards: Mapping[int, int]) -> dict[str, Any]:
    """The parameters of the kernel on one device: fewer steps, and smaller arrays."""
    params = equation.params
    grid = params['grid_mapping']
    blocks = []
    for block in grid.block_mappings:
        shape = list(block.array_aval.shape)
        for dim, step in _walked(block).items():
            shape[dim] //= shards.get(step, 1)
        blocks.append(dataclasses.replace(block, array_aval=block.array_aval.update(shape=tuple(shape))))
    steps = tuple(size // shards.get(step, 1) for step, size in enumerate(grid.grid))
    part = dataclasses.replace(grid, grid=steps, block_mappings=tuple(blocks))
    results = tuple(
        aval.update(shape=block.array_aval.shape)
        for aval, block in zip(params['out_avals'], blocks[len(equation.invars) :], strict=True)
    )
    changed = {**params, 'grid_mapping': part, 'out_avals': results}
    cost = params['cost_estimate']
    if cost is not None:
        devices = math.prod(shards.values())
        fields = {field.name: getattr(cost, field.name) for field in dataclasses.fields(cost)}
        changed['cost_estimate'] = dataclasses.replace(
            cost, **{name: value // devices for name, value in fields.items() if isinstance(value, int)}
        )
    return changed
