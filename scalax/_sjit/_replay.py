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


class _Traced(threading.local):
    """The signatures whose user code ran in this thread, with the trace context and kinds of each."""

    def __init__(self) -> None:
        self.runs: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


class Recordings:
    """The recordings of one sjit function, by signature and trace context."""

    def __init__(self) -> None:
        self.contexts = TraceContexts()
        self._kept: dict[Any, tuple[Recording, ...]] = {}
        self._traced = _Traced()

    def find(self, signature: Any, context: Any, kinds: tuple[Any, ...]) -> Recording | None:
        """The recording of this signature under this trace context, of arguments of these kinds."""
        for recording in self._kept.get(signature, ()):
            if recording.context is context and recording.kinds == kinds:
                return recording
        return None

    def user_code_ran(self, signature: Any, context: Any, kinds: tuple[Any, ...]) -> None:
        """Notes, for `record`, that this thread runs the user's code for *signature* now."""
        self._traced.runs[signature] = context, kinds

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
        self._traced.runs.pop(signature, None)
        traced = jitted.trace(*row)
        context, kinds = self._traced.runs.pop(signature, (None, ()))
        jaxpr = traced.jaxpr
        # Values of an outer trace that the function closes over end with that trace; JAX makes them
        # constants or further inputs. Such a jaxpr cannot be kept.
        closed = len(jaxpr.in_avals) == leaves and not any(
            isinstance(const, jax.core.Tracer) for const in jaxpr.consts
        )
        if context is not None and closed:
            recording = Recording(context, kinds, jaxpr, traced.out_tree)
            # A bounded number: whoever changes the context at every call gains nothing from replays.
            self._kept[signature] = (recording, *self._kept.get(signature, ())[:3])
        return traced
