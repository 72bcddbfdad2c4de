"""Kernels of Pallas: each device runs a kernel on its own rows, where the grid shows that rows are apart.

The compiler cannot partition a kernel; JAX refuses one that sees sharded arrays. Experts write a `shard_map`
around it. Here that is done where it changes nothing: a dimension of the grid walks over blocks of rows,
each block is read and written by its own step, and the kernel does not ask which step it is. Then each
device takes some of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.trail import LOST, Trail, axes_of, closed_spec_of, of_dims
from scalax._jax import kernels
from scalax._jax.equations import shape_of
from scalax._jax.rewriting import equation_of

Steps = Mapping[int, tuple[str, ...]]
"""Dimension of the grid of a kernel -> the mesh axes over which its steps are dealt to devices."""


def on_own_rows(
    equation: Any, trails: Sequence[Trail], mesh: Mesh | AbstractMesh, has_rows: Callable[[Trail], bool]
) -> tuple[Any, Sequence[Trail]]:
    """A kernel that runs on each device with its rows, if it may, and the trails of its results.

    Args:
        equation: the kernel.
        trails: those of its operands.
        mesh: a mesh of Auto axes.
        has_rows: tells whether some dimension of a trail holds rows of the batch.
    """
    over = dealt_steps(equation, trails, mesh, has_rows)
    results = _trails(equation, over)[len(equation.invars) :] if over else []
    if not any(map(has_rows, results)):
        return equation, ()
    return equation if kernels.is_interpreted(equation) else equation_on_rows(equation, over, mesh), results


def equation_on_rows(equation: Any, over: Steps, mesh: Mesh | AbstractMesh) -> Any:
    """The equation of a `shard_map` in which each device takes its steps of a kernel."""
    count, shards = len(equation.invars), shards_of(over, mesh)
    ranks = [len(shape_of(atom)) for atom in (*equation.invars, *equation.outvars)]
    specs = [*map(closed_spec_of, _trails(equation, over), ranks)]

    def on_device(*operands: Any) -> Any:
        return kernels.run_part(equation, operands, shards)

    given, found = tuple(specs[:count]), specs[count:]
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=given, out_specs=found, check_vma=False)
    return equation_of(mapped, equation)


def shards_of(over: Steps, mesh: Mesh | AbstractMesh) -> dict[int, int]:
    """Dimension of the grid -> over how many devices its steps are."""
    return {step: math.prod(mesh.shape[axis] for axis in axes) for step, axes in over.items()}


def _trails(equation: Any, over: Steps) -> list[Trail]:
    """Those of the operands and the results of a kernel; what is not in them is whole."""
    found = [LOST] * kernels.count_whole(equation)
    for block in kernels.blocks(equation):
        dims = {dim: over[step] for dim, step in kernels.walked(block).items() if step in over}
        found.append(of_dims(dims, len(kernels.array_shape(block))))
    return found


def dealt_steps(
    equation: Any, trails: Sequence[Trail], mesh: Mesh | AbstractMesh, has_rows: Callable[[Trail], bool]
) -> Steps:
    """How the steps of a kernel are dealt to the devices that have its operands; empty if they may not be.

    Where operands are over different mesh axes, the first one that has some decides, those with rows before
    others. The arguments are those of `on_own_rows`.
    """
    blocks, whole = kernels.blocks(equation), kernels.count_whole(equation)
    count = len(equation.invars) + len(equation.outvars)
    if whole + len(blocks) != count or any(map(has_rows, trails[:whole])):
        return {}
    over: dict[int, tuple[str, ...]] = {}
    operands = zip(blocks, trails[whole:], strict=False)
    for block, trail in sorted(operands, key=lambda operand: not has_rows(operand[1])):
        for dim, step in kernels.walked(block).items():
            axes = trail[dim] if trail else ()
            if axes and step not in over and axes_of(over.values()).isdisjoint(axes):
                over[step] = axes
    shards = shards_of(over, mesh)
    return {step: over[step] for step in over if kernels.deals_rows(equation, step, shards[step])}
