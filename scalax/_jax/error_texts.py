"""Classification of errors of JAX and of compilers by their texts, if their types do not suffice."""

from __future__ import annotations

import re

_OPTION = re.compile(r"No such compile option: '([^']*)'")
CUSTOM_PARTITIONING = 'CustomSPMDPartitioning'
"""The custom call of ``custom_partitioning``, which a compiler replaces if JAX has registered it."""


def lacks_cluster(error: ValueError) -> bool:
    """Returns whether ``jax.distributed.initialize`` found no cluster to infer missing arguments from.

    Relies on "... must be defined" or "... should be defined".
    """
    return any(text in str(error) for text in ('must be defined', 'should be defined'))


def is_late(error: RuntimeError) -> bool:
    """Returns whether ``jax.distributed.initialize`` came too late. Relies on "must be called before"."""
    return 'must be called before' in str(error)


def is_wrong_libtpu(error: Exception) -> bool:
    """Returns whether JAX cannot use the installed libtpu.

    Relies on "PJRT API version" or "libtpu version" being named.
    """
    return any(text in str(error) for text in ('PJRT API version', 'libtpu version'))


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a program is too large for its device. Relies on the status "RESOURCE_EXHAUSTED"."""
    return 'RESOURCE_EXHAUSTED' in str(error)


def unknown_option(error: Exception) -> str:
    """Returns the option that a compiler does not know; an empty string for other errors.

    Relies on "No such compile option: 'NAME'".
    """
    match = _OPTION.search(str(error))
    return match[1] if match else ''


def lacks_custom_partitioning(error: Exception) -> bool:
    """Returns whether a compiler lacks ``custom_partitioning``. Relies on the name of the custom call."""
    return CUSTOM_PARTITIONING in str(error)


def is_unpartitioned(error: Exception) -> bool:
    """Returns whether the compiler would have to partition a kernel. Relies on NotImplementedError."""
    return isinstance(error, NotImplementedError)


def is_indivisible(error: Exception) -> bool:
    """Returns whether JAX has no type or local shard for a value, because a dimension is not divisible.

    Relies on "evenly divide" or "divisible".
    """
    return any(text in str(error) for text in ('evenly divide', 'divisible'))


def repeats_a_mesh_axis(error: Exception) -> bool:
    """Returns whether a sharding names one mesh axis for two dimensions.

    Relies on "at most one positional dimension" and "duplicate entries".
    """
    return all(text in str(error) for text in ('at most one positional dimension', 'duplicate entries'))
