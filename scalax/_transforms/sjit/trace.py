"""The trace of a user's function, with the helper's mesh and bindings in force.

JAX types an array that is placed on a mesh differently from one that is not, even on Auto axes: the same
call with numpy and with placed arguments is traced twice. The second time the user's code need not run:
the jaxpr of the first trace is replayed. A jaxpr may depend on everything that JAX keeps in its trace
context (precision, x64, the mesh, the bindings of annotations ...), which is part of the `CallKey`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding

from scalax._trace import contexts
from scalax._trace.constraints import apply_shardings
from scalax._transforms.calls.argument_shardings import ArgumentShardings
from scalax._transforms.calls.call_key import CallKey, dynamic_leaves, placement_kinds, type_of
from scalax._transforms.calls.call_signature import CallLayout
from scalax._transforms.calls.placement import Shardings, as_typed
from scalax._transforms.calls.placement_errors import reject_foreign_types
from scalax._tree.paths import path_string
from scalax._util.lru_cache import LRUCache
from scalax.errors import (
    LostUpdateWarning,
    MeshError,
    UnusedAnnotationWarning,
    did_you_mean,
    near_names,
    shown,
    warn,
)


@dataclasses.dataclass(frozen=True, eq=False)
class TraceShardings:
    """The shardings that the trace of one call key applies.

    Attributes:
        arguments: the shardings of the arguments, by slot and leaf.
        constraints: the shardings to which they are constrained inside, likewise.
        outputs: the shardings of the outputs, leaf by leaf; None until the function was traced.
    """

    arguments: Mapping[int, Shardings]
    constraints: Mapping[int, Shardings]
    outputs: Sequence[NamedSharding | None] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Recording:
    """A traced function, to be called with the leaves of arguments of these kinds."""

    kinds: tuple[Any, ...]
    jaxpr: Any
    out_tree: Any

    def replay(self, leaves: list[Any]) -> Any:
        """The outputs for these argument leaves, without running the user's code."""
        return self.out_tree.unflatten(jaxpr_as_fun(self.jaxpr)(*leaves))


class TracedFunction:
    """Runs the user's function while JAX traces it, or replays its jaxpr."""

    def __init__(self, fun: Callable[..., Any], rules: ArgumentShardings) -> None:
        self._fun, self._rules = _weakly(fun), rules
        self._mesh, self._signature = rules.mesh, rules.signature
        self._names = rules.options.annotation_shardings
        self._uses = contexts.Uses(frozenset(self._names))
        # Held, so that JAX finds traces.
        self._contexts: LRUCache[contexts.Context, contexts.Context] = LRUCache()
        self._warned = False
        self.forget()

    def forget(self) -> None:
        """Forgets the jaxprs."""
        self._recordings: LRUCache[CallKey, tuple[_Recording, ...]] = LRUCache()

    def trace(self, key: CallKey, jitted: Any, flat_args: Sequence[Any]) -> jax.stages.Traced:
        """Traces a ``jax.jit`` function that calls `run`, and keeps its jaxpr for `run` to replay."""
        traced = jitted.trace(*flat_args)
        jaxpr = traced.jaxpr
        # Values of an outer trace that the function closes over end with that trace; JAX makes them
        # further inputs. Such a jaxpr cannot be kept.
        if len(jaxpr.in_avals) == len(key.types):
            kinds = placement_kinds(jaxpr.in_avals)
            if self._recorded(key, kinds) is None:
                recording = _Recording(kinds, jaxpr, traced.out_tree)
                self._recordings.put(key, (recording, *(self._recordings.get(key) or ())[:3]))
        return traced

    def _recorded(self, key: CallKey, kinds: tuple[Any, ...]) -> _Recording | None:
        recordings = self._recordings.get(key) or ()
        return next((recording for recording in recordings if recording.kinds == kinds), None)

    def run(
        self, key: CallKey, layout: CallLayout, flat_args: Sequence[Any], shardings: TraceShardings
    ) -> tuple[Any, TraceShardings]:
        """The outputs of a call, and its shardings with those of the outputs."""
        with self._mesh_entered(layout, flat_args):
            outputs = self._outputs(key, layout, flat_args, shardings.constraints)
            if shardings.outputs is None:
                found = self._rules.outputs(outputs, layout, flat_args, shardings.arguments)
                shardings = dataclasses.replace(shardings, outputs=found)
            if self._rules.any_explicit and shardings.outputs is not None:
                # The out_shardings of a jit say nothing about types, and nothing at all where it is traced.
                outputs = as_typed(outputs, shardings.outputs)
            return outputs, shardings

    def run_inline(self, key: CallKey, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """The outputs of a call as they come, on the mesh in force."""
        return self._outputs(key, layout, flat_args, {})

    def _outputs(
        self, key: CallKey, layout: CallLayout, flat_args: Sequence[Any], constraints: Mapping[int, Shardings]
    ) -> Any:
        context = contexts.contexts_of(self._rules.helper).get(self._names)
        self._contexts.put(context, context)
        with contexts.entered(context, self._uses):
            leaves, _ = dynamic_leaves(layout, flat_args)
            recording = self._recorded(key, placement_kinds(map(type_of, leaves)))
            # Values instead of tracers come with jax.disable_jit, and from JAX looking for a nan: then
            # the user's lines should run.
            if recording is not None and all(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                return recording.replay(leaves)
            constrained = list(flat_args)
            for slot, shardings in constraints.items():
                constrained[slot] = apply_shardings(flat_args[slot], shardings)
            args, keywords = self._signature.restore(constrained)
            fun = self._fun()
            assert fun is not None  # whoever calls holds it
            updates = _ModuleUpdates((args, keywords))
            outputs = fun(*args, **keywords)
            updates.warn_lost(self._signature.name, outputs)
            return outputs

    def _mesh_entered(self, layout: CallLayout, flat_args: Sequence[Any]) -> Any:
        """Enters the helper's mesh, for what asks for the mesh in force in the user's code."""
        ambient, mesh = jax.sharding.get_abstract_mesh(), self._mesh
        if jax.config.jax_disable_jit:  # arrays with shardings of their own, and nothing traced
            return contextlib.nullcontext()
        if not ambient.empty and ambient.size != mesh.size:
            raise MeshError(
                f'{self._signature.name} is compiled for a mesh of {mesh.size} devices, and is called '
                f'under jax.set_mesh of one of {ambient.size}: leave that mesh for the call'
            )
        reject_foreign_types(self._signature, layout, flat_args, mesh)
        return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)

    def warn_unused(self, layout: CallLayout) -> None:
        """Warns, once, about bound names that nothing used."""
        if self._warned or not self._names:
            return
        self._warned = True
        seen = sorted(self._uses.asked - self._uses.names)
        unused = self._uses.unused()
        if layout.static:
            # Other static values may lead through other code: only a misspelling is certain.
            unused = [name for name in unused if near_names(name, seen)]
        if unused:
            asked = (
                '; '.join(f'{name!r} ({did_you_mean(name, seen)})' for name in unused)
                if seen
                else f'{", ".join(map(repr, unused))} (it asked for no other name)'
            )
            warn(
                f'{self._signature.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {asked}',
                UnusedAnnotationWarning,
            )


def _weakly(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    try:
        return weakref.ref(fun)
    except TypeError:  # of some types of other libraries
        return lambda: fun


class _ModuleUpdates:
    """The modules of flax.nnx among the arguments of a function, as they are before it runs.

    Args:
        arguments: the arguments, inside the trace.
    """

    def __init__(self, arguments: Any) -> None:
        nnx = sys.modules.get('flax.nnx')  # without it there are no such modules
        self._kind: Any = None if nnx is None else (getattr(nnx, 'Pytree', None) or nnx.Object)
        self._modules = [] if nnx is None else self._found(arguments)
        self._before = list(map(_leaves_by_path, self._modules))

    def warn_lost(self, name: str, outputs: Any) -> None:
        """Warns about what has changed in the modules, and is not among the outputs of the function."""
        if not self._modules:
            return
        returned = set(map(id, self._found(outputs))) | set(map(id, jax.tree.leaves(outputs)))
        lost = [
            f'{type(module).__name__}: {path}'
            for module, before in zip(self._modules, self._before, strict=True)
            if id(module) not in returned
            for path, leaf in _leaves_by_path(module).items()
            if leaf is not before.get(path) and id(leaf) not in returned
        ]
        if lost:
            warn(
                f'{name} changes modules that it was given, and the changes are lost, because a compiled '
                f'function works on a copy (with jax.jit too):\n{shown(lost)}\n'
                'What to do: return the module, or its state (nnx.state), and go on with that; for what '
                'draws random numbers (nnx.Rngs), give other keys at each call.',
                LostUpdateWarning,
            )

    def _found(self, tree: Any) -> list[Any]:
        def is_module(node: Any) -> bool:
            return isinstance(node, self._kind)

        return list(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _leaves_by_path(module: Any) -> dict[str, Any]:
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]}
