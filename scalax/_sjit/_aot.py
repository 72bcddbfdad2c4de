"""How is an executable called that was compiled ahead of time? As the user's function is.

``jax.jit`` lowers a row of slots. Where the user's function has defaults or keywords, what is lowered and
compiled takes the user's call, and hands JAX the row.
"""

from __future__ import annotations

from typing import Any

from scalax._sjit._convention import Convention


class _Stage:
    """A stage of JAX's, with all that it has."""

    def __init__(self, stage: Any, convention: Convention) -> None:
        self._stage, self._convention = stage, convention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class LoweredCall(_Stage):
    """A ``jax.stages.Lowered`` whose executable takes the user's call."""

    def compile(self, /, *args: Any, **kwargs: Any) -> CompiledCall:
        """See ``jax.stages.Lowered.compile``."""
        return CompiledCall(self._stage.compile(*args, **kwargs), self._convention)


class CompiledCall(_Stage):
    """A ``jax.stages.Compiled`` that takes the user's call; static arguments are left out, as with JAX."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable."""
        return self._stage(*self._convention.dynamic_row(args, kwargs))
