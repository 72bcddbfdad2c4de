"""How is a user's function traced only once, although JAX traces it again? By replaying its jaxpr.

JAX types an array that lies on a mesh differently from one that does not, even on Auto axes: the same
call with numpy and with placed arguments is traced twice. The second time the user's code need not run:
the jaxpr of the first time says all. But a jaxpr may depend on everything that JAX keeps in its trace
context (precision, x64, the mesh, the bindings of annotations ...), so a recording is only replayed
under an equal context, which `TraceContexts` identifies by public means.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from scalax._recent import Recent


class TraceContexts:
    """Tells JAX's trace contexts apart.

    JAX caches the trace of a function by its trace context; so the (empty) jaxpr that it gives back for a
    function that does nothing is one object for equal contexts, and different objects for different ones.
    The function is one's own, because JAX's cache lives as long as the function does.
    """

    def __init__(self) -> None:
        self._probe = jax.jit(lambda: ())

    def current(self) -> Any:
        """An object that is the same (by identity) whenever JAX's trace context is the same."""
        return self._probe.trace().jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """A traced function: call it with the leaves of the arguments."""

    context: Any
    kinds: tuple[Any, ...]
    jaxpr: Any
    out_tree: Any

    def replay(self, leaves: list[Any]) -> Any:
        """The outputs for these argument leaves, without running the user's code."""
        return self.out_tree.unflatten(jaxpr_as_fun(self.jaxpr)(*leaves))


class _Recording(threading.local):
    """The signatures recorded in this thread now; with the trace context and kinds, if user code ran."""

    def __init__(self) -> None:
        self.runs: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


class Recordings:
    """The recordings of one sjit function, by signature and trace context."""

    def __init__(self) -> None:
        self.contexts = TraceContexts()
        self._kept: Recent[Any, tuple[Recording, ...]] = Recent()
        self._now = _Recording()

    def find(self, signature: Any, context: Any, kinds: tuple[Any, ...]) -> Recording | None:
        """The recording of this signature under this trace context, of arguments of these kinds."""
        for recording in self._kept.get(signature) or ():
            if recording.context is context and recording.kinds == kinds:
                return recording
        return None

    def user_code_ran(self, signature: Any, context: Any, kinds: tuple[Any, ...]) -> None:
        """Notes, for `record`, that this thread runs the user's code for *signature* now."""
        if signature in self._now.runs:
            self._now.runs[signature] = context, kinds

    def record(self, signature: Any, jitted: Any, row: Sequence[Any], leaves: int) -> Any:
        """Traces a jitted function, and keeps the outcome if that ran the user's code.

        Args:
            signature: the signature of the call.
            jitted: the function.
            row: the call.
            leaves: the number of leaves of its arguments.

        Returns:
            What ``jitted.trace(*row)`` returns.
        """
        self._now.runs[signature] = None, ()
        try:
            traced = jitted.trace(*row)
        finally:
            context, kinds = self._now.runs.pop(signature)
        jaxpr = traced.jaxpr
        # Values of an outer trace that the function closes over end with that trace; JAX makes them
        # further inputs. Such a jaxpr cannot be kept.
        if context is not None and len(jaxpr.in_avals) == leaves:
            recording = Recording(context, kinds, jaxpr, traced.out_tree)
            # A bounded number: whoever changes the context at every call gains nothing from replays.
            self._kept.put(signature, (recording, *(self._kept.get(signature) or ())[:3]))
        return traced
