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
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.trail import LOST, Trail, closed_spec_of, of_dims
from scalax._jax import kernels
from scalax._jax.equations import shape_of
from scalax._jax.rewriting import equation_of


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
        atoms = (*self.equation.invars, *self.equation.outvars)
        specs = [
            closed_spec_of(trail, len(shape_of(atom))) for trail, atom in zip(trails, atoms, strict=True)
        ]
        mapped = jax.shard_map(
            self.on_device,
            mesh=self.mesh,
            in_specs=tuple(specs[:count]),
            out_specs=specs[count:],
            check_vma=False,
        )
        return equation_of(mapped, self.equation)

    def on_device(self, *operands: Any) -> Any:
        """The results of one device, of its parts of the operands."""
        return kernels.run_part(self.equation, operands, self.shards)

    @property
    def shards(self) -> dict[int, int]:
        """Dimension of the grid -> over how many devices its steps are."""
        return {step: math.prod(self.mesh.shape[axis] for axis in axes) for step, axes in self.over.items()}

    def _trails(self) -> list[Trail]:
        whole = [LOST] * kernels.count_whole(self.equation)
        return whole + [
            of_dims(
                {dim: self.over[step] for dim, step in kernels.walked(block).items() if step in self.over},
                len(kernels.array_shape(block)),
            )
            for block in kernels.blocks(self.equation)
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
    blocks, whole = kernels.blocks(equation), kernels.count_whole(equation)
    if whole + len(blocks) != len(equation.invars) + len(equation.outvars) or any(
        map(has_rows, trails[:whole])
    ):
        return None
    operands = zip(blocks, trails[whole:], strict=False)
    axes = _axes_of_steps(sorted(operands, key=lambda operand: not has_rows(operand[1])))
    shards = Split(equation, axes, mesh).shards
    over = {step: axes[step] for step in axes if kernels.deals_rows(equation, step, shards[step])}
    return Split(equation, over, mesh) if over else None


def _axes_of_steps(operands: Sequence[tuple[Any, Trail]]) -> dict[int, tuple[str, ...]]:
    """Dimension of the grid -> the mesh axes over the dimensions of operands that it walks over.

    The first operand that has some decides.
    """
    found: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for block, trail in operands:
        walked = kernels.walked(block)
        for dim, axes in enumerate(trail):
            step = walked.get(dim)
            if axes and step is not None and step not in found and used.isdisjoint(axes):
                found[step] = axes
                used.update(axes)
    return found
