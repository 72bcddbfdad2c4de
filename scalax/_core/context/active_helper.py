"""The active helper with its annotation bindings, and the active mapping of named axes.

The active `Context` is a JAX user context (``jax.make_user_context``), so it is part of JAX's own trace
cache key, and local to a thread. A function that was traced under one context is traced again under another:
a shared inner ``jax.jit``, a ``scan`` body or a checkpointed function never sees the annotations of another
caller. Equal bindings of one helper are one context, whichever functions bind them and however they are
nested: what these share is traced once. The mapping, and the mesh whose first device stands in for it, are
user contexts, too.
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
    """The part of `MeshShardingHelper` that the packages below it need."""

    @property
    def mesh(self) -> Mesh:
        """The mesh; an AbstractMesh is possible."""

    @property
    def on_indivisible(self) -> OnIndivisible:
        """The policy of bare specs."""

    @property
    def partitioning(self) -> Any:
        """How compiled functions are partitioned along their batch."""

    @property
    def partition_batch(self) -> bool:
        """Whether compiled functions find out which arguments are batches."""


# Created at import, because creating a user context is not thread-safe.
_active = jax.make_user_context(None)
_active_mapping = jax.make_user_context(None)
_traced_for_one_device = jax.make_user_context(None)


def single_device_mesh(mesh: Mesh, device: Any) -> Mesh:
    """A mesh with the axes of another one, all of size 1, over one device."""
    devices = np.full((1,) * len(mesh.axis_names), device, dtype=object)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def tracing_for_single_device(mesh: Mesh) -> Any:
    """A context manager in which code that helpers of *mesh* compile or map is traced for its first device.

    So a function whose code closes over a helper can be traced for one device, as long as the code does not
    use the mesh itself. Helpers that arrange the same devices in another mesh are treated alike. JAX shares
    no traces between meshes.
    """
    return _traced_for_one_device(mesh)


def active_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh that stands in for *mesh* in this thread: by default *mesh* itself."""
    replaced = _traced_for_one_device.value
    if replaced is None or not isinstance(mesh, Mesh):
        return mesh
    device = replaced.devices.flat[0]
    if mesh != replaced and {*mesh.devices.flat} != {*replaced.devices.flat}:
        return mesh
    return single_device_mesh(mesh, device)


def current_mapping() -> LogicalAxisShardingRule | None:
    """The mapping of named axes that is active in this thread, as a rule; None without one."""
    return _active_mapping.value


def activate_mapping(mapping: LogicalAxisShardingRule) -> Any:
    """A context manager in which *mapping* is the active one. Equal mappings share JAX's traces."""
    return _active_mapping(mapping)


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """An active helper and the bindings in force; compared and hashed by identity.

    Attributes:
        owner: a weak reference to the helper, which keeps its contexts; constraints use its mesh.
        bindings: annotation name -> the helper that bound it, weakly, and its rules.
        used_names: the names that were used inside inner traces, such as that of an inner ``jax.jit``: under
            this context JAX may reuse such a trace without running its code.
    """

    owner: weakref.ref[MeshOwner]
    bindings: Mapping[str, tuple[weakref.ref[MeshOwner], RuleLike]]
    used_names: set[str] = dataclasses.field(default_factory=set)

    @property
    def helper(self) -> MeshOwner:
        """The active helper. The code that entered this context holds it."""
        helper = self.owner()
        assert helper is not None
        return helper

    def rules(self) -> dict[str, RuleLike]:
        """Every name in force with its rules."""
        return {name: rules for name, (_, rules) in self.bindings.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Frame:
    """One entered context, with the names that were used in it, and the trace in which it was entered."""

    context: Context
    used_names: set[str]
    trace: Any


class _Entered(threading.local):
    """What this thread has entered, the innermost last.

    Attributes:
        frames: the contexts.
        managers: the `ActiveHelper` objects, each with the context manager of its context; None in place of
            one that was left before its turn.
    """

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.managers: list[tuple[ActiveHelper | None, Any]] = []


_entered = _Entered()


def current() -> Context | None:
    """The context that is active in this thread, or None."""
    reference = _active.value
    return reference() if reference else None


@contextlib.contextmanager
def activate(context: Context, asked: set[str]) -> Iterator[None]:
    """A context manager in which *context* is the active one; *asked* gets the names that are used in it."""
    frames = _entered.frames
    frames.append(_Frame(context, asked, current_trace()))
    try:
        # Weakly: JAX's caches would keep its helper and rules alive. References to one context are equal.
        with _active(weakref.ref(context)):
            yield
    finally:
        frames.pop()
        asked |= context.used_names  # names in code that JAX did not trace again count too
        if frames:
            frames[-1].context.used_names.update(context.used_names)


def look_up_annotation(name: str) -> tuple[MeshOwner, RuleLike] | None:
    """The helper and rules that *name* is bound to in this thread; records that it was asked for."""
    context = current()
    if context is None:
        return None
    trace = current_trace()
    for frame in _entered.frames:
        frame.used_names.add(name)
        if frame.trace != trace:  # inside an inner trace, which JAX may reuse
            frame.context.used_names.add(name)
    found = context.bindings.get(name)
    if found is None:
        return None
    helper = found[0]()
    assert helper is not None  # the code that bound the name holds it
    return helper, found[1]


_contexts: weakref.WeakKeyDictionary[MeshOwner, weakref.WeakValueDictionary[Any, Context]]
_contexts = weakref.WeakKeyDictionary()
_keep = functools.lru_cache(maxsize=lru_cache.SIZE)(lambda context: context)
_lock = threading.RLock()  # re-entrant: comparing the rules of users may run their code


def context_for(helper: MeshOwner, bindings: Mapping[str, RuleLike]) -> Context:
    """The context of *bindings* inside the one that is active now.

    Equal bindings have the same one: contexts are part of JAX's cache keys by identity, and a new one for
    every call would trace and compile everything again. The most recently used are kept; those whose rules
    may refer to the helper, as a user's function does, as long as a caller keeps them.
    """
    outer, owner = current(), weakref.ref(helper)
    own = {name: (owner, rules) for name, rules in bindings.items()}
    merged = {**(outer.bindings if outer else {}), **own}
    bound = sorted(merged.items())
    key = tuple([(name, by, hashable(cache_key(rules))) for name, (by, rules) in bound])
    with _lock:
        own_contexts = _contexts.setdefault(helper, weakref.WeakValueDictionary())
        context = own_contexts.get(key)
        if context is None:
            context = own_contexts[key] = Context(owner, merged)
    return _keep(context) if all(are_pure(rules) for _, rules in merged.values()) else context


@dataclasses.dataclass(frozen=True, eq=False)
class _ByIdentity:
    """Stands for a rule that cannot be hashed, such as a plain dataclass, in the key of a context."""

    rules: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.rules is self.rules

    def __hash__(self) -> int:
        return id(self.rules)


def hashable(rules: Any) -> Any:
    """A stand-in for rules, such as `cache_key` gives, that can be hashed."""
    try:
        hash(rules)
    except TypeError:
        return tuple(map(hashable, rules)) if isinstance(rules, tuple) else _ByIdentity(rules)
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
    for name in bindings:
        if not isinstance(name, str):
            raise StructureError(f'annotation names are strings, got {name!r} in annotation_shardings')
    return {name: checked_rules(rules, f'annotation_shardings[{name!r}]') for name, rules in bindings.items()}


class ActiveHelper:
    """What `MeshShardingHelper.get_context` returns: a reusable, re-entrant context manager.

    It belongs to a thread, and contexts are left in the reverse order of entering: other orders, as of
    generators or asyncio tasks that take turns, are an error.

    Attributes:
        mesh_helper: the helper.
        annotation_shardings: the bindings given, or None.
    """

    def __init__(
        self,
        mesh_helper: MeshOwner,
        kept: LRUCache[Context, Context],
        annotation_shardings: Mapping[str, RuleLike] | None,
    ) -> None:
        self._bindings = checked_bindings(annotation_shardings)
        self.mesh_helper = mesh_helper
        self.annotation_shardings = annotation_shardings
        self._kept = kept

    def __enter__(self) -> ActiveHelper:
        context = context_for(self.mesh_helper, self._bindings)
        self._kept.add(context, context)  # so that equal bindings find it later
        manager = activate(context, set())
        manager.__enter__()
        _entered.managers.append((self, manager))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack = _entered.managers
        if stack and stack[-1][0] is self:
            stack.pop()[1].__exit__(kind, error, trace)
            while stack and stack[-1][0] is None:  # those left before their turn
                stack.pop()[1].__exit__(None, None, None)
            return
        own = [place for place, (owner, _) in enumerate(stack) if owner is self]
        if own:
            stack[own[-1]] = (None, stack[own[-1]][1])
        if error is None:
            raise MeshError(
                'a get_context() is left before one that was entered after it, or in another thread: the '
                'code in it has run with another helper active. This happens where generators or asyncio '
                'tasks take turns inside of it: enter it again between two yields or awaits, or use one '
                'helper for all'
            )
