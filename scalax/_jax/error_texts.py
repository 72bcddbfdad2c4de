"""What errors of JAX and of compilers are about, where their types do not tell: their texts are read."""

from __future__ import annotations

import re

_OPTION = re.compile(r"No such compile option: '([^']*)'")
CUSTOM_PARTITIONING = 'CustomSPMDPartitioning'
"""What JAX makes of ``custom_partitioning``; a compiler replaces it, if JAX has told it how."""


def lacks_cluster(error: ValueError) -> bool:
    """Whether ``jax.distributed.initialize`` found no cluster that gives what was left out.

    Relies on "... must be defined" or "... should be defined".
    """
    return any(said in str(error) for said in ('must be defined', 'should be defined'))


def is_late(error: RuntimeError) -> bool:
    """Whether ``jax.distributed.initialize`` came after JAX was used. Relies on "must be called before"."""
    return 'must be called before' in str(error)


def is_wrong_libtpu(error: Exception) -> bool:
    """Whether JAX cannot use the libtpu that is installed.

    Relies on "PJRT API version" or "libtpu version" being named.
    """
    return any(said in str(error) for said in ('PJRT API version', 'libtpu version'))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a program is too large for its device. Relies on the status "RESOURCE_EXHAUSTED"."""
    return 'RESOURCE_EXHAUSTED' in str(error)


def unknown_option(error: Exception) -> str:
    """The option that a compiler does not know; empty if this is not the matter.

    Relies on "No such compile option: 'NAME'".
    """
    found = _OPTION.search(str(error))
    return found[1] if found else ''


def lacks_custom_partitioning(error: Exception) -> bool:
    """Whether a compiler was not told of ``custom_partitioning``. Relies on the name of the custom call."""
    return CUSTOM_PARTITIONING in str(error)


def is_unpartitioned(error: Exception) -> bool:
    """Whether the compiler would have to partition a kernel. Relies on a NotImplementedError of JAX."""
    return isinstance(error, NotImplementedError)


def is_indivisible(error: Exception) -> bool:
    """Whether JAX has no type for a value, or no block, because a dimension does not divide.

    Relies on "evenly divide" or "divisible".
    """
    return any(said in str(error) for said in ('evenly divide', 'divisible'))


def repeats_a_mesh_axis(error: Exception) -> bool:
    """Whether a sharding names one mesh axis for two dimensions.

    Relies on "at most one positional dimension" and "duplicate entries".
    """
    return all(text in str(error) for text in ('at most one positional dimension', 'duplicate entries'))
