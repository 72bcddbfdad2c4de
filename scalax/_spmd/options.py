"""What users choose of partitioning along the batch: dtypes of what is sent, and when it is sent."""

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
        param_dtype: the floating dtype in which weights are gathered where they meet examples. A weight of a
            wider dtype is rounded to it before the gather, and the step computes with the rounded weight in
            the dtypes that it is written in. The stored weight, its gradient and its update keep their
            dtype. None gathers each weight in the dtype in which the step uses it: after a cast such as
            ``w.astype(jnp.bfloat16)``, in bfloat16.
        reduce_dtype: the floating dtype in which gradients are reduced. They have their own dtype before and
            after. None reduces each gradient in the dtype in which the backward pass computes it, before a
            cast to a wider one: gradients of bfloat16 products in bfloat16, as FSDP2 does where
            ``reduce_dtype`` is None. ``jnp.float32`` reduces them without more rounding, in twice the bytes.
        reshard_after_forward: whether weights are gathered again in the backward pass. False keeps them from
            the forward pass on: half of the gathers, and memory for all weights on each device. The weights
            of a loop over layers are then gathered once, before the loop.
        reduce_per_microbatch: whether a loop that adds up the gradients of microbatches reduces those of
            sharded weights in each round, so that each device holds the sum of its own block. False reduces
            once, after the loop, as ``no_sync`` does in PyTorch: fewer bytes, and memory for all gradients on
            each device. None holds sums if all of them take at most twice the memory of the largest one, as
            in a loss over chunks of tokens, which has one weight; the gradients of a model are reduced in
            each round. Gradients of replicated weights, as in DDP and along the slow axis of HSDP, take no
            more memory unreduced, and are always reduced once.

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
        """The dtype in which a weight of a dtype is gathered; None if that is its own."""
        if self.param_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return None
        return self.param_dtype if self.param_dtype.itemsize < dtype.itemsize else None

    def reduce_dtype_for(self, dtype: Any) -> Any:
        """The dtype in which a gradient of a dtype is reduced; None if that is its own."""
        if self.reduce_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return None
        return self.reduce_dtype if self.reduce_dtype != dtype else None


def _floating(name: str, dtype: Any) -> Any:
    """A dtype that is floating, or None."""
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ArgumentError(
            f'BatchPartitioning({name}=...) is a floating dtype such as jnp.bfloat16 or None, got {dtype!r}'
        )
    return found


DEFAULT = BatchPartitioning()


def checked_partitioning(options: Any) -> BatchPartitioning | None:
    """Returns options that users give; raises ArgumentError if they are something else."""
    if options is not None and not isinstance(options, BatchPartitioning):
        raise ArgumentError(
            'partitioning is BatchPartitioning(reduce_dtype=jnp.float32) or None, which takes that of the '
            f'helper, got {options!r}'
        )
    return options
