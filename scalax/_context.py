"""Which helper is active, and which sharding does each annotation name have here?

The active `Context` is a JAX user context (``jax.make_user_context``), so it is part of JAX's own trace
cache key: a function that JAX has traced under one context is traced again under another. That is what
keeps a shared inner ``jax.jit``, a ``scan`` body or a checkpointed function from seeing the annotations
of whoever traced it first. It also makes the context local to a thread.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from scalax._prefix import RuleLike, check, is_rule, key_of
from scalax._recent import Recent
from scalax._spec import OnIndivisible
from scalax.errors import StructureError


class MeshOwner(Protocol):
    """What the layers below `MeshShardingHelper` need of it."""

    @property
    def mesh(self) -> Mesh:
        """The mesh; an AbstractMesh is possible."""

    @property
    def on_indivisible(self) -> OnIndivisible:
        """The policy of bare specs."""


# Created at import, because creating a user context is not thread-safe.
_active = jax.make_user_context(None)


class _Token:
    """What JAX's caches hold of a context: they live long, and should keep no helper or rule alive."""

    __slots__ = ('context',)

    def __init__(self, context: Context) -> None:
        self.context = weakref.ref(context)


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """An active helper and its bindings; compared and hashed by identity.

    Attributes:
        helper: the helper whose mesh constraints use.
        bindings: annotation name -> rules, of this context alone.
        outside: the context in which this one is entered, weakly; its bindings are inherited.
        used: the names of `bindings` that some trace has used. JAX may reuse an inner trace without
            running it again, but only under the same context, where its names are already here.
        asked: every name that some trace has asked for, bound or not.
        token: what stands for this context in JAX's caches.
    """

    helper: MeshOwner
    bindings: Mapping[str, RuleLike]
    outside: weakref.ref[Context] | None = None
    used: set[str] = dataclasses.field(default_factory=set)
    asked: set[str] = dataclasses.field(default_factory=set)
    token: _Token = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Made here, once: of two tokens, which threads in a race would make, JAX knows one only.
        object.__setattr__(self, 'token', _Token(self))

    @property
    def outer(self) -> Context | None:
        """The context in which this one is entered. It is alive while anything runs in this one."""
        return self.outside() if self.outside else None

    def bound(self, name: str) -> tuple[MeshOwner, RuleLike] | None:
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
    token = _active.value
    return token.context() if token else None


def entered(context: Context) -> Any:
    """A context manager in which *context* is the active one; the caller keeps it alive meanwhile."""
    return _active(context.token)


class ContextCache:
    """Gives the same Context for the same bindings in the same outer context.

    Contexts are part of JAX's cache keys by identity: a fresh one for every call would trace and compile
    everything again.
    """

    def __init__(self, helper: MeshOwner) -> None:
        self._helper = weakref.ref(helper)
        self._outermost: Recent[Any, Context] = Recent()
        self._inside: weakref.WeakKeyDictionary[Context, Recent[Any, Context]] = weakref.WeakKeyDictionary()

    def get(self, bindings: Mapping[str, RuleLike]) -> Context:
        """The context of *bindings* inside the one that is active now."""
        outer = current()
        kept = self._outermost if outer is None else self._inside.setdefault(outer, Recent())
        key = tuple((name, _hashable(key_of(bindings[name]))) for name in sorted(bindings))
        known = kept.get(key)
        if known is None:
            helper = self._helper()
            assert helper is not None  # whoever owns this cache holds the helper
            outside = None if outer is None else weakref.ref(outer)
            known = kept.add(key, Context(helper, dict(bindings), outside))
        return known


@dataclasses.dataclass(frozen=True, eq=False)
class _ByIdentity:
    """Stands for a rule that cannot be hashed, such as a plain dataclass, in the key of a context."""

    rules: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.rules is self.rules

    def __hash__(self) -> int:
        return id(self.rules)


def _hashable(rules: Any) -> Any:
    try:
        hash(rules)
    except TypeError:
        return tuple(map(_hashable, rules)) if isinstance(rules, tuple) else _ByIdentity(rules)
    return rules


def checked_bindings(bindings: Mapping[str, RuleLike] | None) -> dict[str, RuleLike]:
    """The bindings of a context, checked.

    Raises:
        StructureError: not a dict of annotation name -> rule.
    """
    if bindings is None:
        return {}
    if is_rule(bindings) or not isinstance(bindings, Mapping):
        raise StructureError(
            f'annotation_shardings is a dict of annotation name -> rule, got {type(bindings).__name__}'
        )
    for name, rules in bindings.items():
        if not isinstance(name, str):
            raise StructureError(f'annotation names are strings, got {name!r} in annotation_shardings')
        check(rules, f'annotation_shardings[{name!r}]')
    return dict(bindings)


class ActiveHelper:
    """What `MeshShardingHelper.get_context` returns: a reusable, re-entrant context manager.

    Attributes:
        mesh_helper: the helper.
        annotation_shardings: the bindings given, or None.
    """

    def __init__(
        self,
        mesh_helper: MeshOwner,
        cache: ContextCache,
        annotation_shardings: Mapping[str, RuleLike] | None,
    ) -> None:
        self._bindings = checked_bindings(annotation_shardings)
        self.mesh_helper = mesh_helper
        self.annotation_shardings = annotation_shardings
        self._cache = cache
        self._entered = threading.local()

    def __enter__(self) -> ActiveHelper:
        context = self._cache.get(self._bindings)
        manager = entered(context)
        manager.__enter__()
        if not hasattr(self._entered, 'stack'):
            self._entered.stack = []
        self._entered.stack.append((manager, context))  # the context lives while it is entered
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        manager, _ = self._entered.stack.pop()
        manager.__exit__(kind, error, trace)
