"""Orbax, imported where it is used. What no documentation of it promises is in `scalax._jax.orbax`."""

from __future__ import annotations

from typing import Any

from scalax.errors import MissingDependencyError


def orbax() -> Any:
    """The module ``orbax.checkpoint``, imported where it is used.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        if error.name not in ('orbax', 'orbax.checkpoint'):  # of what Orbax needs itself
            raise
        raise MissingDependencyError(
            'checkpoints are written and read by Orbax: pip install orbax-checkpoint'
        ) from error
    return orbax.checkpoint
