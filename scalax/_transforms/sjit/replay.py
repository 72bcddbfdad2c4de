"""How is a user's function traced only once, although JAX traces it again? By replaying its jaxpr.

JAX types an array that lies on a mesh differently from one that does not, even on Auto axes: the same
call with numpy and with placed arguments is traced twice. The second time the user's code need not run:
the jaxpr of the first time says all. A jaxpr may depend on everything that JAX keeps in its trace
context (precision, x64, the mesh, the bindings of annotations ...), which is part of the signature.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from jax.extend.core import jaxpr_as_fun

from scalax._util.lru_cache import Recent


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """A traced function: call it with the leaves of the arguments."""

    kinds: tuple[Any, ...]
    jaxpr: Any
    out_tree: Any

    def replay(self, leaves: list[Any]) -> Any:
        """The outputs for these argument leaves, without running the user's code."""
        return self.out_tree.unflatten(jaxpr_as_fun(self.jaxpr)(*leaves))


class _Recording(threading.local):
    """The signatures recorded in this thread now; with the kinds of leaves, if user code ran."""

    def __init__(self) -> None:
        self.runs: dict[Any, tuple[Any, ...] | None] = {}


class Recordings:
    """The recordings of one sjit function, by signature."""

    def __init__(self) -> None:
        self._kept: Recent[Any, tuple[Recording, ...]] = Recent()
        self._now = _Recording()

    def find(self, key: Any, kinds: tuple[Any, ...]) -> Recording | None:
        """The recording of this signature, of arguments of these kinds."""
        for recording in self._kept.get(key) or ():
            if recording.kinds == kinds:
                return recording
        return None

    def user_code_ran(self, key: Any, kinds: tuple[Any, ...]) -> None:
        """Notes, for `record`, that this thread runs the user's code for *signature* now."""
        if key in self._now.runs:
            self._now.runs[key] = kinds

    def record(self, key: Any, jitted: Any, flat_args: Sequence[Any], leaves: int) -> Any:
        """Traces a jitted function, and keeps the outcome if that ran the user's code.

        Args:
            key: the key of the call.
            jitted: the function.
            flat_args: the call.
            leaves: the number of leaves of its arguments.

        Returns:
            What ``jitted.trace(*row)`` returns.

        Raises:
            RecursionError: the function calls itself in the same way, as of ``jax.jit``.
        """
        if key in self._now.runs:
            raise RecursionError(
                f'{jitted.__name__} calls itself with arguments of the same shapes and dtypes'
            )
        self._now.runs[key] = None
        try:
            traced = jitted.trace(*flat_args)
        finally:
            kinds = self._now.runs.pop(key)
        jaxpr = traced.jaxpr
        # Values of an outer trace that the function closes over end with that trace; JAX makes them
        # further inputs. Such a jaxpr cannot be kept.
        if kinds is not None and len(jaxpr.in_avals) == leaves:
            recording = Recording(kinds, jaxpr, traced.out_tree)
            self._kept.put(key, (recording, *(self._kept.get(key) or ())[:3]))
        return traced
