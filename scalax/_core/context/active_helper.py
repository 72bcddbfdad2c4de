"""The active helper with its annotation bindings, and the active mapping of named axes.

The active `Context` is a JAX user context (``jax.make_user_context``), so it is thread-local, and part of
JAX's trace cache key. A function that was traced under one context is traced again under another: a shared
inner ``jax.jit``, a ``scan`` body or a checkpointed function never sees the annotations of another caller.
Equal bindings of one helper are one context, independently of the functions that bind them and of their
nesting, so that shared functions are traced once. The active mapping, and the mesh that is replaced by its
first device, are user contexts too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from scalax._core.util import lru_cache
from scalax._core.util.lru_cache import LRUCache
from scalax._jax.tracing import current_trace
from scalax.errors import MeshError, StructureError
from scalax.rules import LogicalAxisShardingRule
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._rule import is_rule
from scalax.rules._rule_tree import RuleLike, are_pure, cache_key, checked_rules


class MeshOwner(Protocol):
    """The part of `MeshShardingHelper` that lower packages use."""

    @property
    def mesh(self) -> Mesh:
        """The mesh, which may be an AbstractMesh."""

    @property
    def on_indivisible(self) -> OnIndivisible:
        """The policy of bare specs."""

    @property
    def partitioning(self) -> Any:
        """How compiled functions are partitioned along their batch."""

    @property
    def partition_batch(self) -> bool:
        """Whether compiled functions find out which arguments are batches."""


# Created at import, because the creation of a user context is not thread-safe.
_active = jax.make_user_context(None)
_active_mapping = jax.make_user_context(None)
_traced_for_one_device = jax.make_user_context(None)


def single_device_mesh(mesh: Mesh, device: Any) -> Mesh:
    """Returns a mesh over one device, with the axes of *mesh*, all of size 1."""
    devices = np.full((1,) * len(mesh.axis_names), device, dtype=object)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def tracing_for_single_device(mesh: Mesh) -> Any:
    """Returns a context manager in which helpers of *mesh* trace code for its first device only.

    It allows tracing a function that closes over a helper for one device, as long as the function does not
    use the mesh itself. Helpers that arrange the same devices in another mesh are treated identically. JAX
    does not share traces between meshes.
    """
    return _traced_for_one_device(mesh)


def active_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns the mesh to use in place of *mesh* in this thread: by default *mesh* itself."""
    replaced = _traced_for_one_device.value
    if replaced is None or not isinstance(mesh, Mesh):
        return mesh
    device = replaced.devices.flat[0]
    if mesh != replaced and {*mesh.devices.flat} != {*replaced.devices.flat}:
        return mesh
    return single_device_mesh(mesh, device)


def current_mapping() -> LogicalAxisShardingRule | None:
    """Returns the mapping of named axes that is active in this thread, as a rule, or None."""
    return _active_mapping.value


def activate_mapping(mapping: LogicalAxisShardingRule) -> Any:
    """Returns a context manager in which *mapping* is active. Equal mappings share JAX's traces."""
    return _active_mapping(mapping)


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """An active helper and the active bindings; compared and hashed by identity.

    Attributes:
        owner: a weak reference to the helper, because the helper keeps its contexts alive.
        bindings: annotation name -> a weak reference to the helper that bound it, and the rules.
        used_names: the names that were used inside inner traces, such as that of an inner ``jax.jit``: under
            this context JAX may reuse such a trace without running its code.
    """

    owner: weakref.ref[MeshOwner]
    bindings: Mapping[str, tuple[weakref.ref[MeshOwner], RuleLike]]
    used_names: set[str] = dataclasses.field(default_factory=set)

    @property
    def helper(self) -> MeshOwner:
        """The active helper, which the code that entered the context keeps alive."""
        helper = self.owner()
        assert helper is not None
        return helper

    def rules(self) -> dict[str, RuleLike]:
        """Returns the rules of every bound name."""
        return {name: rules for name, (_, rules) in self.bindings.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Frame:
    """An entered context, the names that were used in it, and the trace in which it was entered."""

    context: Context
    used_names: set[str]
    trace: Any


class _ThreadStack(threading.local):
    """The contexts that this thread has entered, the innermost last.

    Attributes:
        frames: the contexts.
        managers: the `ActiveHelper` objects, each with the context manager of its context. None replaces an
            object that was exited out of order.
    """

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.managers: list[tuple[ActiveHelper | None, Any]] = []


_stack = _ThreadStack()


def current() -> Context | None:
    """Returns the context that is active in this thread, or None."""
    reference = _active.value
    return reference() if reference else None


@contextlib.contextmanager
def activate(context: Context, used_names: set[str]) -> Iterator[None]:
    """Makes *context* the active one, and adds the names that are used in it to *used_names*."""
    frames = _stack.frames
    frames.append(_Frame(context, used_names, current_trace()))
    try:
        # A weak reference: JAX's caches would keep its helper and rules alive. References to one context are
        # equal.
        with _active(weakref.ref(context)):
            yield
    finally:
        frames.pop()
        used_names |= context.used_names  # includes names in code whose trace JAX reused
        if frames:
            frames[-1].context.used_names.update(context.used_names)


def look_up_annotation(name: str) -> tuple[MeshOwner, RuleLike] | None:
    """Returns the helper and rules that *name* is bound to in this thread, and records its use."""
    context = current()
    if context is None:
        return None
    trace = current_trace()
    for frame in _stack.frames:
        frame.used_names.add(name)
        if frame.trace != trace:  # inside an inner trace, which JAX may reuse
            frame.context.used_names.add(name)
    binding = context.bindings.get(name)
    if binding is None:
        return None
    owner, rules = binding
    helper = owner()
    assert helper is not None  # the code that bound the name keeps it alive
    return helper, rules


_contexts: weakref.WeakKeyDictionary[MeshOwner, weakref.WeakValueDictionary[Any, Context]]
_contexts = weakref.WeakKeyDictionary()
_keep = functools.lru_cache(maxsize=lru_cache.SIZE)(lambda context: context)
_lock = threading.RLock()  # re-entrant: comparing rules may run users' code


def context_for(helper: MeshOwner, bindings: Mapping[str, RuleLike]) -> Context:
    """Returns the context of *bindings* inside the active context.

    Equal bindings have the same context, because contexts are part of JAX's cache keys by identity: a new
    context for every call would trace and compile everything again. The most recently used contexts are
    kept alive. Contexts whose rules may refer to the helper, as a user's function may, live only as long as
    a caller keeps them alive.
    """
    outer, owner = current(), weakref.ref(helper)
    inner = {name: (owner, rules) for name, rules in bindings.items()}
    merged = {**(outer.bindings if outer else {}), **inner}
    pairs = sorted(merged.items())
    key = tuple([(name, by, hashable(cache_key(rules))) for name, (by, rules) in pairs])
    with _lock:
        contexts = _contexts.setdefault(helper, weakref.WeakValueDictionary())
        context = contexts.get(key)
        if context is None:
            context = contexts[key] = Context(owner, merged)
    return _keep(context) if all(are_pure(rules) for _, rules in merged.values()) else context


@dataclasses.dataclass(frozen=True, eq=False)
class _ByIdentity:
    """A hashable substitute for an unhashable rule, such as a plain dataclass, in the key of a context."""

    rules: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.rules is self.rules

    def __hash__(self) -> int:
        return id(self.rules)


def hashable(rules: Any) -> Any:
    """Returns a hashable substitute for the result of `cache_key`."""
    try:
        hash(rules)
    except TypeError:
        return tuple(map(hashable, rules)) if isinstance(rules, tuple) else _ByIdentity(rules)
    return rules


def checked_bindings(bindings: Mapping[str, RuleLike] | None) -> dict[str, RuleLike]:
    """Returns the bindings of a context, after checking them.

    Raises:
        StructureError: they are not a dict of annotation name -> rule.
    """
    if bindings is None:
        return {}
    if is_rule(bindings) or not isinstance(bindings, Mapping):
        raise StructureError(
            f'annotation_shardings is a dict of annotation name -> rule, got {type(bindings).__name__}'
        )
    for name in bindings:
        if not isinstance(name, str):
            raise StructureError(f'annotation names are strings, got {name!r} in annotation_shardings')
    return {name: checked_rules(rules, f'annotation_shardings[{name!r}]') for name, rules in bindings.items()}


class ActiveHelper:
    """What `MeshShardingHelper.get_context` returns: a reusable, re-entrant context manager.

    It belongs to a thread, and contexts must be exited in the reverse order of entering. Other orders, which
    interleaved generators or asyncio tasks cause, are an error.

    Attributes:
        mesh_helper: the helper.
        annotation_shardings: the bindings given, or None.
    """

    def __init__(
        self,
        mesh_helper: MeshOwner,
        contexts: LRUCache[Context, Context],
        annotation_shardings: Mapping[str, RuleLike] | None,
    ) -> None:
        self._bindings = checked_bindings(annotation_shardings)
        self.mesh_helper = mesh_helper
        self.annotation_shardings = annotation_shardings
        self._contexts = contexts

    def __enter__(self) -> ActiveHelper:
        context = context_for(self.mesh_helper, self._bindings)
        self._contexts.add(context, context)  # keeps it alive for equal bindings
        manager = activate(context, set())
        manager.__enter__()
        _stack.managers.append((self, manager))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack = _stack.managers
        if stack and stack[-1][0] is self:
            stack.pop()[1].__exit__(kind, error, trace)
            while stack and stack[-1][0] is None:  # those that were exited out of order
                stack.pop()[1].__exit__(None, None, None)
            return
        positions = [i for i, (owner, _) in enumerate(stack) if owner is self]
        if positions:
            stack[positions[-1]] = (None, stack[positions[-1]][1])
        if error is None:
            raise MeshError(
                'a get_context() is exited before one that was entered after it, or in another thread, so '
                'its code has run with another active helper. Interleaved generators or asyncio tasks cause '
                'this: enter the context again between two yields or awaits, or use one helper for all'
            )
