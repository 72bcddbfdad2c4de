"""The user's options of batch partitioning: the dtypes and the schedule of gathers and reductions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from scalax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class BatchPartitioning:
    """How weights are gathered and gradients reduced along the mesh axes of the batch.

    The names are those of PyTorch's FSDP2 (``MixedPrecisionPolicy`` and ``fully_shard``).

    Args:
        param_dtype: the floating dtype in which weights are gathered for use with examples. Weights of a
            wider dtype are rounded to it before the gather; the step then computes with the rounded weight,
            in its own dtypes. The stored weight, its gradient and its update keep their dtype. None gathers
            each weight in the dtype in which the step uses it, such as bfloat16 after
            ``w.astype(jnp.bfloat16)``.
        reduce_dtype: the floating dtype in which gradients are reduced. They keep their dtype before and
            after. None reduces each gradient in the dtype in which the backward pass computes it, before a
            cast to a wider one: gradients of bfloat16 matmuls in bfloat16, as FSDP2 does if its
            ``reduce_dtype`` is None. ``jnp.float32`` adds no rounding, and sends twice the bytes.
        reshard_after_forward: whether weights are gathered again in the backward pass. False keeps them
            gathered from the forward pass on, which halves the gathers, and needs memory for all weights on
            each device. The weights of a scan over layers are then gathered once, before the scan.
        reduce_per_microbatch: whether a loop that accumulates the gradients of microbatches reduces the
            gradients of sharded weights in each iteration, so that each device holds its shard of the sum.
            False reduces once, after the loop, as ``no_sync`` does in PyTorch: fewer bytes sent, but memory
            for all gradients on each device. None reduces once if the gradients together take at most twice
            the memory of the largest one (as in a chunked loss, which has one weight), and in each iteration
            otherwise. Gradients of replicated weights, as in DDP and along the slow axis of HSDP, take the
            same memory unreduced, and are always reduced once.

    Raises:
        ArgumentError: a dtype that is not floating, or a flag that is not a bool.

    Example:
        >>> import jax.numpy as jnp
        >>> BatchPartitioning(reduce_dtype=jnp.float32).reduce_dtype
        dtype('float32')
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    reshard_after_forward: bool = True
    reduce_per_microbatch: bool | None = None

    def __post_init__(self) -> None:
        for name in ('param_dtype', 'reduce_dtype'):
            object.__setattr__(self, name, _floating(name, getattr(self, name)))
        for name, others in (('reshard_after_forward', ''), ('reduce_per_microbatch', ', or None')):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (others and value is None):
                raise ArgumentError(f'BatchPartitioning({name}=...) is True or False{others}, got {value!r}')

    def param_dtype_for(self, dtype: Any) -> Any:
        """Returns the dtype in which a weight is gathered; None if it keeps its dtype."""
        if self.param_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return None
        return self.param_dtype if self.param_dtype.itemsize < dtype.itemsize else None

    def reduce_dtype_for(self, dtype: Any) -> Any:
        """Returns the dtype in which a gradient is reduced; None if it keeps its dtype."""
        if self.reduce_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return None
        return self.reduce_dtype if self.reduce_dtype != dtype else None


def _floating(name: str, dtype: Any) -> Any:
    """Checks that an option is a floating dtype or None, and returns it as a `numpy.dtype`."""
    if dtype is None:
        return None
    try:
        result = np.dtype(dtype)
    except TypeError:
        result = None
    if result is None or not jnp.issubdtype(result, jnp.floating):
        raise ArgumentError(
            f'BatchPartitioning({name}=...) is a floating dtype such as jnp.bfloat16, or None, got {dtype!r}'
        )
    return result


DEFAULT = BatchPartitioning()


def checked_partitioning(options: Any) -> BatchPartitioning | None:
    """Returns the user's options. Raises ArgumentError if they are not `BatchPartitioning` or None."""
    if options is not None and not isinstance(options, BatchPartitioning):
        raise ArgumentError(
            'partitioning is a BatchPartitioning, such as BatchPartitioning(reduce_dtype=jnp.float32), '
            f'or None for that of the helper, got {options!r}'
        )
    return options
