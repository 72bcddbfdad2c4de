"""Kernels of Pallas: each device runs a kernel on its own examples if the grid shows that they are apart.

A dimension of the grid walks over blocks of examples. If each block is read and written by a step of its own,
and the kernel does not ask which step it is, then each device takes the steps of its examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax import kernels
from scalax._jax.manual import ManualCode
from scalax._spmd.placement import REPLICATE, Placement, Shard


def of_kernel(
    equation: Any, placements: Sequence[Placement], blocks: int
) -> tuple[list[Placement], list[Placement]] | None:
    """Returns the placements of the operands and of the results of a kernel; None if it takes all examples.

    Args:
        equation: a `pallas_call`.
        placements: those of its operands along one axis.
        blocks: into how many blocks all batch axes split a dimension.
    """
    arrays, whole = kernels.blocks(equation), kernels.count_whole(equation)
    operands = len(equation.invars)
    if whole + len(arrays) != operands + len(equation.outvars):
        return None
    if any(isinstance(x, Shard) and not x.is_state for x in placements[:whole]):
        return None
    steps = [
        kernels.walked(array).get(x.dim)
        for array, x in zip(arrays, placements[whole:], strict=False)
        if isinstance(x, Shard) and not x.is_state
    ]
    step = next((x for x in steps if x is not None), None)
    if step is None or not kernels.deals_rows(equation, step, blocks):
        return None
    found: list[Placement] = [REPLICATE] * whole
    for array in arrays:
        dims = [dim for dim, other in kernels.walked(array).items() if other == step]
        found.append(Shard(dims[0]) if dims else REPLICATE)
    return found[:operands], found[operands:]


def kernel_params(
    code: ManualCode, equation: Any, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Returns the parameters of a kernel that runs on blocks.

    Args:
        code: makes equations.
        equation: a `pallas_call`.
        operands: the local shapes of its operands.
        results: those of its results.
    """
    whole, shards = kernels.count_whole(equation), dict[int, int]()
    for array, local in zip(kernels.blocks(equation), [*operands, *results][whole:], strict=False):
        shape = kernels.array_shape(array)
        for dim, step in kernels.walked(array).items():
            if local[dim] != shape[dim]:
                shards[step] = shape[dim] // local[dim]
    params = kernels.part_params(equation, shards) if shards else {}
    if kernels.is_interpreted(equation):
        return kernels.interpreted_params(equation, params, code.in_context)
    return params
