"""Which helper is active, and which sharding does each annotation name have here?

The active `Context` is a JAX user context (``jax.make_user_context``), so it is part of JAX's own trace
cache key: a function that JAX has traced under one context is traced again under another. That is what
keeps a shared inner ``jax.jit``, a ``scan`` body or a checkpointed function from seeing the annotations
of whoever traced it first. It also makes the context local to a thread.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from scalax._prefix import RuleLike, key_of

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper

# Created at import, because creating a user context is not thread-safe.
_active = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """An active helper and its bindings; compared and hashed by identity.

    Attributes:
        helper: the helper whose mesh constraints use.
        bindings: annotation name -> rules, of this context alone.
        outer: the context in which this one was entered; its bindings are inherited.
        used: the names of `bindings` that some trace has used. JAX may reuse an inner trace without
            running it again, but only under the same context, where its names are already here.
        asked: every name that some trace has asked for, bound or not.
    """

    helper: MeshShardingHelper
    bindings: Mapping[str, RuleLike]
    outer: Context | None = None
    used: set[str] = dataclasses.field(default_factory=set)
    asked: set[str] = dataclasses.field(default_factory=set)

    def bound(self, name: str) -> tuple[MeshShardingHelper, RuleLike] | None:
        """The helper and rules that *name* is bound to, here or outside; records the use."""
        self.asked.add(name)
        if name in self.bindings:
            self.used.add(name)
            return self.helper, self.bindings[name]
        return self.outer.bound(name) if self.outer else None

    def all_bindings(self) -> dict[str, RuleLike]:
        """Every name in force with its rules, inherited ones included."""
        inherited = self.outer.all_bindings() if self.outer else {}
        return {**inherited, **self.bindings}


def current() -> Context | None:
    """The context that is active in this thread, or None."""
    return _active.value


def entered(context: Context) -> Any:
    """A context manager in which *context* is the active one."""
    return _active(context)


class ContextCache:
    """Gives the same Context for the same bindings in the same outer context.

    Contexts are part of JAX's cache keys by identity: a fresh one for every call would trace and compile
    everything again.
    """

    def __init__(self, helper: MeshShardingHelper) -> None:
        self._helper = helper
        self._kept: dict[Any, Context] = {}

    def get(self, bindings: Mapping[str, RuleLike]) -> Context:
        """The context of *bindings* inside the one that is active now."""
        outer = current()
        key = (outer, tuple((name, key_of(rules)) for name, rules in sorted(bindings.items())))
        # setdefault, so that threads that race for a new context agree on one.
        return self._kept.get(key) or self._kept.setdefault(key, Context(self._helper, dict(bindings), outer))


class ActiveHelper:
    """What `MeshShardingHelper.get_context` returns: a reusable, re-entrant context manager.

    Attributes:
        mesh_helper: the helper.
        annotation_shardings: the bindings given, or None.
    """

    def __init__(
        self,
        mesh_helper: MeshShardingHelper,
        cache: ContextCache,
        annotation_shardings: Mapping[str, RuleLike] | None,
    ) -> None:
        self.mesh_helper = mesh_helper
        self.annotation_shardings = annotation_shardings
        self._cache = cache
        self._entered = threading.local()

    def __enter__(self) -> ActiveHelper:
        manager = entered(self._cache.get(self.annotation_shardings or {}))
        manager.__enter__()
        if not hasattr(self._entered, 'stack'):
            self._entered.stack = []
        self._entered.stack.append(manager)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.stack.pop().__exit__(kind, error, trace)
