"""The trace of a user's function, with the helper's mesh and bindings in force.

JAX types an array that is placed on a mesh differently from one that is not, even on Auto axes: the same
call with numpy and with placed arguments is traced twice. The second time the user's code need not run:
the jaxpr of the first trace is replayed. A jaxpr may depend on everything that JAX keeps in its trace
context (precision, x64, the mesh, the bindings of annotations ...), which is part of the `CallKey`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from scalax._follow.run import run_followed
from scalax._follow.types import Arguments, Followed
from scalax._jax import rewriting
from scalax._jax.tracing import is_compiled, is_opaque, memory_space, type_of
from scalax._trace import contexts
from scalax._trace.constraints import apply_sharding, on_devices
from scalax._transforms.calls.call import Call, CallKey, Shardings, has_type
from scalax._transforms.calls.errors import reject_foreign_types
from scalax._transforms.calls.shardings import FunctionRules
from scalax._transforms.calls.signature import CallLayout
from scalax._util import lru_cache
from scalax.errors import MeshError, UnusedAnnotationWarning, did_you_mean, near_names, warn
from scalax.interop._module_updates import ModuleUpdates


@dataclasses.dataclass(eq=False)
class Trace:
    """What the traces of one call key apply, and what the first finds; filled in in this order.

    Attributes:
        arguments: the shardings of the arguments. In the key of placed arrays they may be None: their types
            hold the sharding. Host data has a separate key, whose shardings are the target.
        any_explicit: whether the type of an argument holds a sharding.
        constraints: the shardings to which arguments are constrained inside; None without any.
        batch: what is followed from the arguments; None if nothing is.
        followed: the values that are kept where they are; None if nothing is followed.
        outputs: the shardings of the outputs; None until the function was traced.
        out_tree: the structure of the outputs.
        jaxpr: the jaxpr of the function, which later traces replay; None if it cannot be kept.
        kinds: the kinds of values that it was traced with (`_kinds`).
        on_devices: whether the outputs are constrained to the devices of the mesh, which JAX does not know
            otherwise.
    """

    arguments: Shardings = ()
    any_explicit: bool = False
    constraints: Shardings | None = None
    batch: Arguments | None = None
    followed: Followed | None = None
    outputs: Shardings | None = None
    out_tree: Any = None
    jaxpr: Any = None
    kinds: Any = None
    on_devices: bool = False

    def record(self, traced: jax.stages.Traced, key: CallKey) -> None:
        """Keeps the jaxpr of the first trace."""
        self.out_tree = traced.out_tree
        # Values of an outer trace that the function closes over end with that trace; JAX makes them further
        # inputs.
        if len(traced.jaxpr.in_avals) == len(key.types):
            self.jaxpr, self.kinds = traced.jaxpr, _kinds(traced.jaxpr.in_avals)


def _kinds(types: Sequence[Any]) -> list[Any]:
    """The part of types that no rule depends on, and a traced function may."""
    # A trace may depend on more of an opaque type: it equals nothing.
    return [
        (type(kind).__name__, memory_space(kind))
        if isinstance(kind, jax.core.ShapedArray) or not is_opaque(kind)
        else object()
        for kind in types
    ]


class TracedFunction:
    """Runs the user's function while JAX traces it, or replays its jaxpr.

    Args:
        helper: the helper of the mesh.
        fun: the user's function; it and the helper are held weakly, and callers hold them.
        rules: the rules of the function.
    """

    def __init__(self, helper: contexts.MeshOwner, fun: Callable[..., Any], rules: FunctionRules) -> None:
        self._helper, self._fun, self._rules = weakref.ref(helper), _weakly(fun), rules
        self._source = _source_of(fun)
        mesh = rules.mesh
        self._mesh = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        self._names = rules.options.annotation_shardings
        self._asked: set[str] = set()
        # Held, because JAX finds traces by the identity of their context.
        self._keep = functools.lru_cache(maxsize=lru_cache.SIZE)(lambda context: context)
        self._warned = False

    @property
    def helper(self) -> contexts.MeshOwner:
        """The helper of the mesh."""
        helper = self._helper()
        assert helper is not None
        return helper

    def run(self, call: Call, trace: Trace) -> Any:
        """The outputs of a call; notes how they are sharded, and what was followed."""
        if jax.config.jax_disable_jit:  # arrays with shardings of their own, and nothing traced
            return self._sharded(call, trace)
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and ambient.size != self._mesh.size:
            raise MeshError(
                f'{call.signature.name} is compiled for a mesh of {self._mesh.size} devices, and is called '
                f'under jax.set_mesh of one of {ambient.size}: exit that mesh before the call'
            )
        if trace.any_explicit:
            reject_foreign_types(call, self._mesh)
        # For operations in the user's code that need a mesh in force.
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._sharded(call, trace)

    def _sharded(self, call: Call, trace: Trace) -> Any:
        outputs = self._outputs(call, trace)
        if trace.on_devices and is_compiled():
            outputs = on_devices(outputs, self._rules.mesh)
        if trace.outputs is None:
            trace.outputs = self._rules.outputs(outputs, call, trace.arguments)
        if not self._rules.any_explicit:
            return outputs
        # The out_shardings of a jit change no types, and are ignored where it is traced.
        leaves, treedef = jax.tree.flatten(outputs)
        typed = [
            leaf if to is None or has_type(leaf, to) else apply_sharding(leaf, to)
            for leaf, to in zip(leaves, trace.outputs, strict=True)
        ]
        return jax.tree.unflatten(treedef, typed)

    def _outputs(self, call: Call, trace: Trace) -> Any:
        # There are values instead of tracers under jax.disable_jit, and where JAX looks for a nan: then the
        # user's lines should run.
        traced = not [leaf for leaf in call.leaves if not isinstance(leaf, jax.core.Tracer)]
        if traced and trace.jaxpr is not None and trace.kinds == _kinds([*map(type_of, call.leaves)]):
            with self._context_entered():
                return jax.tree.unflatten(trace.out_tree, rewriting.run(trace.jaxpr, call.leaves))
        flat_args = call.flat_args
        if trace.constraints is not None:
            pairs = zip(call.leaves, trace.constraints, strict=True)
            flat_args = call.replaced([x if to is None else apply_sharding(x, to) for x, to in pairs])
        # Where jax.disable_jit is traced all the same (`lower`, jax.grad around it), a `jit` is no equation.
        if trace.batch is None or not traced or jax.config.jax_disable_jit:
            return self.run_users(flat_args)

        structure: Any = None

        def flat_function(*flat_args: Any) -> Any:
            nonlocal structure
            outputs = self.run_users(flat_args)
            structure = jax.tree.structure(outputs)
            return outputs

        users = self.as_users(flat_function, call.layout)
        results, trace.followed = run_followed(
            users, flat_args, call.layout.static, trace.batch, self._rules.mesh
        )
        return jax.tree.unflatten(structure, results)

    def run_users(self, flat_args: Sequence[Any]) -> Any:
        """What the user's function returns, with the bindings of annotations in force."""
        with self._context_entered():
            args, keywords = self._rules.signature.restore(flat_args)
            fun = self._fun()
            assert fun is not None  # callers hold it
            if 'flax.nnx' not in sys.modules:
                return fun(*args, **keywords)
            updates = ModuleUpdates(sys.modules['flax.nnx'], (args, keywords))
            outputs = fun(*args, **keywords)
            updates.warn_lost(self._rules.signature.name, outputs)
            return outputs

    def _context_entered(self) -> Any:
        context = self._keep(contexts.context_of(self.helper, self._names))
        return contexts.entered(context, self._asked)

    def as_users(self, flat_function: Callable[..., Any], layout: CallLayout) -> Callable[..., Any]:
        """Gives a function of slots the name, the parameters and the source that JAX's messages show."""
        flat_function.__name__ = flat_function.__qualname__ = self._rules.signature.name
        flat_function.__dict__['__signature__'] = layout.flat_signature
        flat_function.__dict__['__wrapped__'] = self._source
        return flat_function

    def warn_unused(self, *, any_static: bool) -> None:
        """Warns, once, about bound names that nothing used."""
        if self._warned or not self._names:
            return
        self._warned = True
        seen = sorted(self._asked - self._names.keys())
        unused = sorted(self._names.keys() - self._asked)
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
                f'{self._rules.signature.name}: annotation_shardings binds names that no '
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
