"""Attention by cuDNN (``jax.nn.dot_product_attention(..., implementation='cudnn')``) on blocks.

It is a kernel, so nothing shows in it that examples are apart. They are, unless a batch is packed from
several sequences, or keys are in pages. Then, and where weights are dropped by chance, all examples are
gathered. The gradient of a bias that all examples share is a sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry
from scalax._jax import kernels
from scalax._jax.equations import shape_of, size_of
from scalax._jax.manual_axes import ManualEquations
from scalax._spmd.operations.pallas_kernels import in_shard_map
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.placement import REPLICATE, SUM, Placement, Shard

ATTENTION = frozenset(('dot_product_attention_fwd_wrapper', 'dot_product_attention_bwd_wrapper'))

# The numbers of the operands: queries, keys and values; a bias; lengths; offsets and pages, which are empty
# unless a batch is packed; and of the gradient what the forward pass has left.
_VALUES, _BIAS, _LENGTHS, _PACKED, _FORWARD = slice(0, 3), 3, slice(4, 6), slice(6, 10), slice(10, 13)


def attention_placements(
    equation: Any, placements: Sequence[Placement]
) -> tuple[list[Placement], list[Placement]] | None:
    """Returns the placements of the operands and of the results; None if attention takes all examples.

    Args:
        equation: attention by cuDNN, or its gradient.
        placements: those of its operands along one axis.
    """
    operands, is_gradient = equation.invars, kernels.is_attention_gradient(equation)
    if len(operands) != (_FORWARD.stop if is_gradient else _PACKED.stop) or any(
        map(size_of, operands[_PACKED])
    ):
        return None
    is_split = any(isinstance(x, Shard) and x.dim and not x.is_state for x in placements)  # in time or heads
    if is_split or kernels.has_attention_dropout(equation):
        return None
    examples = shape_of(operands[0])[0]
    found = list[Placement]()
    for i, atom in enumerate(operands):
        count = shape_of(atom)[0]
        if count not in (examples, 0) and (i != _BIAS or count != 1):
            return None
        found.append(Shard(0) if count == examples else REPLICATE)
    results: list[Placement] = [Shard(0)] * len(equation.outvars)
    if is_gradient and len(results) > len(operands[_VALUES]) and shape_of(operands[_BIAS])[0] != examples:
        results[-1] = SUM
    return found, results


def attention_along_auto_axes(
    code: ManualEquations, auto: AutoShardings, equation: Any, operands: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Returns attention on blocks, on a mesh with axes that stay Auto inside: they may shard the heads.

    Args:
        code: makes equations.
        auto: where values are along these axes.
        equation: attention by cuDNN, or its gradient.
        operands: its operands, of local shapes.
        results: its results, of local shapes.
    """
    dim, atoms = kernels.attention_heads_dim(equation), equation.invars
    known = [auto.of(atom) for atom in atoms[_VALUES]]
    axes = {dims[dim] if dims else () for dims in known}
    heads = shape_of(atoms[0])[dim]
    bias_heads = shape_of(atoms[_BIAS])[1] if size_of(atoms[_BIAS]) else heads
    names = axes.pop() if len(axes) == 1 and bias_heads == heads else ()
    entry = canonical_entry(names)
    of_values = PartitionSpec(*[None] * dim, entry)
    of_heads = PartitionSpec(None, entry)  # of a bias, and of what is left of the softmax
    specs = [PartitionSpec()] * len(operands)
    specs[_VALUES] = [of_values] * 3
    if size_of(atoms[_BIAS]):
        specs[_BIAS] = of_heads
    if kernels.is_attention_gradient(equation):
        specs[_FORWARD] = [of_heads, of_values, of_values]
        ends = [*[of_values] * 3, of_heads]
    else:
        ends = [of_values, of_heads]
    specs += ends[: len(results)]
    return in_shard_map(code, auto, equation, operands, results, specs, {})
