"""The trace of a user's function, with the helper's mesh and bindings in force.

JAX types an array that is placed on a mesh differently from one that is not, even on Auto axes: the same
call with numpy and with placed arguments is traced twice. The second time the user's code need not run:
the jaxpr of the first trace is replayed. A jaxpr may depend on everything that JAX keeps in its trace
context (precision, x64, the mesh, the bindings of annotations ...), which is part of the `CallKey`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from scalax._follow.types import Arguments, Followed
from scalax._trace import contexts
from scalax._trace.constraints import abstract, apply_shardings, is_compiled, on_devices
from scalax._transforms.calls.argument_shardings import ArgumentShardings
from scalax._transforms.calls.call_key import Call, CallKey, placement_kinds, type_of
from scalax._transforms.calls.call_signature import CallLayout, CallSignature
from scalax._transforms.calls.placement import Shardings, as_typed
from scalax._transforms.calls.placement_errors import reject_foreign_types
from scalax._transforms.followed import run_followed
from scalax._tree.paths import describe_leaf, path_string
from scalax._util.lru_cache import LRUCache
from scalax.errors import (
    LostUpdateWarning,
    MeshError,
    UnusedAnnotationWarning,
    did_you_mean,
    near_names,
    shown_leaves,
    warn,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """The jaxpr of a traced function.

    Attributes:
        kinds: the `placement_kinds` of the leaves that it was traced with.
        jaxpr: the jaxpr.
        out_tree: the structure of the outputs.
    """

    kinds: list[Any]
    jaxpr: Any
    out_tree: Any

    @classmethod
    def of(cls, traced: jax.stages.Traced, key: CallKey) -> Recording | None:
        """The recording of a trace; None if it cannot be kept."""
        # Values of an outer trace that the function closes over end with that trace; JAX makes them further
        # inputs.
        if len(traced.jaxpr.in_avals) != len(key.types):
            return None
        return cls(placement_kinds(traced.jaxpr.in_avals), traced.jaxpr, traced.out_tree)

    def serves(self, leaves: Sequence[Any]) -> bool:
        """Whether the trace of these argument leaves is the same."""
        # There are values instead of tracers under jax.disable_jit, and where JAX looks for a nan: then the
        # user's lines should run.
        return all(isinstance(leaf, jax.core.Tracer) for leaf in leaves) and self.kinds == placement_kinds(
            map(type_of, leaves)
        )

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The outputs for these argument leaves, without running the user's code."""
        return self.out_tree.unflatten(jaxpr_as_fun(self.jaxpr)(*leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class TraceShardings:
    """The shardings that the traces of one call key apply.

    Attributes:
        arguments: the shardings of the arguments, by slot and leaf.
        constraints: the shardings to which they are constrained inside, likewise.
        batch: what is followed from the arguments; None if nothing is.
        outputs: the shardings of the outputs, leaf by leaf; None until the function was traced.
        recording: the first trace, which later ones replay, if it can be kept.
        followed: the values that are kept where they are in it.
        on_devices: whether the outputs are constrained to the devices of the mesh, which JAX does not know
            otherwise.
    """

    arguments: Mapping[int, Shardings]
    constraints: Mapping[int, Shardings]
    batch: Arguments | None = None
    outputs: Sequence[NamedSharding | None] | None = None
    recording: Recording | None = None
    followed: Followed | None = None
    on_devices: bool = False


class TracedFunction:
    """Runs the user's function while JAX traces it, or replays its jaxpr."""

    def __init__(self, fun: Callable[..., Any], rules: ArgumentShardings) -> None:
        self._fun, self._rules = _weakly(fun), rules
        self._source = _source_of(fun)
        self._names = rules.options.annotation_shardings
        self._uses = contexts.Uses(frozenset(self._names))
        # Held, because JAX finds traces by the identity of their context.
        self._contexts: LRUCache[contexts.Context, contexts.Context] = LRUCache()
        self._warned = False

    def run(self, call: Call, shardings: TraceShardings) -> tuple[Any, TraceShardings]:
        """The outputs of a call, and its shardings with those of the outputs."""
        with self._mesh_entered(call):
            outputs, followed = self._outputs(call, shardings)
            if shardings.on_devices and is_compiled():
                outputs = on_devices(outputs, self._rules.mesh)
            if followed is not None:
                shardings = dataclasses.replace(shardings, followed=followed)
            if shardings.outputs is None:
                found = self._rules.outputs(outputs, call, shardings.arguments)
                shardings = dataclasses.replace(shardings, outputs=found)
            if self._rules.any_explicit and shardings.outputs is not None:
                # The out_shardings of a jit change no types, and are ignored where it is traced.
                outputs = as_typed(outputs, shardings.outputs)
            return outputs, shardings

    def run_inline(self, call: Call) -> Any:
        """The outputs of a call on the mesh in force, without shardings."""
        return self._outputs(call, TraceShardings({}, {}))[0]

    def _outputs(self, call: Call, shardings: TraceShardings) -> tuple[Any, Followed | None]:
        """The outputs of a call, and the values that are kept where they are, if it is followed now."""
        leaves = jax.tree.leaves(call.data)
        recording = shardings.recording
        if recording is not None and recording.serves(leaves):
            with self._context_entered():
                return recording.replay(leaves), None
        flat_args = list(call.flat_args)
        for slot, constraints in shardings.constraints.items():
            flat_args[slot] = apply_shardings(flat_args[slot], constraints)
        # There are values instead of tracers under jax.disable_jit, and where JAX looks for a nan. Where the
        # former is traced all the same (`lower`, jax.grad around it), a `jit` is no equation.
        traced = all(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if shardings.batch is None or not traced or jax.config.jax_disable_jit:
            return self._call(call.signature, flat_args), None

        structure: Any = None

        def flat_function(*flat_args: Any) -> Any:
            nonlocal structure
            outputs = self._call(call.signature, flat_args)
            structure = jax.tree.structure(outputs)
            return outputs

        users = self.as_users(flat_function, call.layout)
        mesh, static = self._rules.mesh, call.layout.static
        results, followed = run_followed(users, flat_args, static, shardings.batch, mesh)
        return jax.tree.unflatten(structure, results), followed

    def _call(self, signature: CallSignature, flat_args: Sequence[Any]) -> Any:
        """What the user's function returns, with the bindings of annotations in force."""
        with self._context_entered():
            args, keywords = signature.restore(flat_args)
            fun = self._fun()
            assert fun is not None  # callers hold it
            nnx = sys.modules.get('flax.nnx')
            if nnx is None:
                return fun(*args, **keywords)
            updates = _ModuleUpdates(nnx, (args, keywords))
            outputs = fun(*args, **keywords)
            updates.warn_lost(signature.name, outputs)
            return outputs

    def _context_entered(self) -> Any:
        context = contexts.contexts_of(self._rules.helper).get(self._names)
        self._contexts.put(context, context)
        return contexts.entered(context, self._uses)

    def as_users(self, flat_function: Callable[..., Any], layout: CallLayout) -> Callable[..., Any]:
        """Gives a function of slots the name, the parameters and the source that JAX's messages show."""
        signature = self._rules.signature
        flat_function.__name__ = flat_function.__qualname__ = signature.name
        flat_function.__dict__['__signature__'] = signature.flat_signature(layout)
        flat_function.__dict__['__wrapped__'] = self._source
        return flat_function

    def _mesh_entered(self, call: Call) -> Any:
        """Enters the helper's mesh, for operations in the user's code that need a mesh in force."""
        ambient, mesh = jax.sharding.get_abstract_mesh(), self._rules.mesh
        if jax.config.jax_disable_jit:  # arrays with shardings of their own, and nothing traced
            return contextlib.nullcontext()
        if not ambient.empty and ambient.size != mesh.size:
            raise MeshError(
                f'{call.signature.name} is compiled for a mesh of {mesh.size} devices, and is called '
                f'under jax.set_mesh of one of {ambient.size}: exit that mesh before the call'
            )
        reject_foreign_types(call, mesh)
        return jax.sharding.use_abstract_mesh(abstract(mesh))

    def warn_unused(self, name: str, *, any_static: bool) -> None:
        """Warns, once, about bound names that nothing used."""
        if self._warned or not self._names:
            return
        self._warned = True
        seen = sorted(self._uses.asked - self._uses.names)
        unused = self._uses.unused()
        if any_static:
            # Other static values may lead through other code: only a misspelling is certain.
            unused = [each for each in unused if near_names(each, seen)]
        if unused:
            asked = (
                '; '.join(f'{each!r} ({did_you_mean(each, seen)})' for each in unused)
                if seen
                else f'{", ".join(map(repr, unused))} (it asked for no other name)'
            )
            warn(
                f'{name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {asked}',
                UnusedAnnotationWarning,
            )


def _weakly(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    try:
        return weakref.ref(fun)
    except TypeError:  # of some types of other libraries
        return lambda: fun


def _source_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the source of *fun*, without its globals, defaults and closure."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    code = getattr(inspect.unwrap(fun), '__code__', None)
    if not isinstance(code, types.CodeType):
        return _unknown
    return types.FunctionType(code, {}, closure=tuple([types.CellType() for _ in code.co_freevars]))


def _unknown() -> None:
    """The source of functions that have none."""


class _ModuleUpdates:
    """The modules of flax.nnx among the arguments of a function, as they are before it runs.

    Args:
        nnx: the module ``flax.nnx``.
        arguments: the arguments, inside the trace.
    """

    def __init__(self, nnx: Any, arguments: Any) -> None:
        self._kind = getattr(nnx, 'Pytree', None) or nnx.Object
        self._modules = self._found(arguments)
        self._before = list(map(_leaves_by_path, self._modules))

    def warn_lost(self, name: str, outputs: Any) -> None:
        """Warns about changes of the modules that are not among the outputs of the function."""
        if not self._modules:
            return
        returned = set(map(id, self._found(outputs))) | set(map(id, jax.tree.leaves(outputs)))
        lost = [
            f'{describe_leaf(path, leaf)} of {type(module).__name__}'
            for module, before in zip(self._modules, self._before, strict=True)
            if id(module) not in returned
            for path, leaf in _leaves_by_path(module).items()
            if leaf is not before.get(path) and id(leaf) not in returned
        ]
        if lost:
            warn(
                f'{name} changes modules that it was given, and the changes are lost, because a compiled '
                f'function works on a copy (with jax.jit too):\n{shown_leaves(lost)}\n'
                'What to do: use scalax.interop.nnx.sjit, which changes them; or return the module, or its '
                'state (nnx.state), and go on with that.',
                LostUpdateWarning,
            )

    def _found(self, tree: Any) -> list[Any]:
        def is_module(node: Any) -> bool:
            return isinstance(node, self._kind)

        return list(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _leaves_by_path(module: Any) -> dict[str, Any]:
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]}
