"""How a user's function runs, with the helper's mesh and bindings in force: traced, replayed, or inline.

JAX types an array that is placed on a mesh differently from one that is not, even on Auto axes: the same
call with numpy and with placed arguments is traced twice. The second time the user's code need not run:
the jaxpr of the first trace is replayed. A jaxpr may depend on everything that JAX keeps in its trace
context (precision, x64, the mesh, the bindings of annotations ...), which is part of the `CallKey`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._compile.call.call_key import Call, call_key
from scalax._compile.call.placement_errors import reject_foreign_types
from scalax._compile.call.resolve_arguments import FunctionRules
from scalax._compile.call.signature import CallLayout
from scalax._compile.sjit import partitioned
from scalax._compile.sjit.batch_arguments import batch_made_inside, batch_of
from scalax._compile.sjit.program_table import Entry, Pipelines
from scalax._core.context import active_helper
from scalax._core.context.constraints import (
    apply_shardings,
    constrain_to_devices,
    retyped_mesh,
)
from scalax._core.pytree.partition_specs import spec_axes
from scalax._core.pytree.paths import path_string
from scalax._core.util import lru_cache
from scalax._jax import rewriting
from scalax._jax.tracing import is_compiled, is_opaque, memory_space, type_of
from scalax._spmd.options import DEFAULT
from scalax._spmd.pipelines.config import Pipeline
from scalax.errors import MeshError, StagesError, UnusedAnnotationWarning, did_you_mean, near_names, warn
from scalax.interop._module_updates import ModuleUpdates


def record(entry: Entry, traced: jax.stages.Traced) -> None:
    """Keeps the jaxpr of the first trace of a key."""
    entry.out_tree = traced.out_tree
    # Values of an outer trace that the function closes over end with that trace; JAX makes them further
    # inputs.
    if len(traced.jaxpr.in_avals) == len(entry.key.types):
        entry.jaxpr, entry.kinds = traced.jaxpr, _kinds(traced.jaxpr.in_avals)


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
    """Runs the user's function while JAX traces it or where it is called, or replays its jaxpr.

    Args:
        helper: the helper of the mesh.
        fun: the user's function; it and the helper are held weakly, and callers hold them.
        rules: the rules of the function.
    """

    def __init__(
        self, helper: active_helper.MeshOwner, fun: Callable[..., Any], rules: FunctionRules
    ) -> None:
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
    def helper(self) -> active_helper.MeshOwner:
        """The helper of the mesh."""
        helper = self._helper()
        assert helper is not None
        return helper

    def run(self, call: Call, entry: Entry) -> Any:
        """Returns the outputs of a call; notes how they are sharded, and how the step is partitioned."""
        if jax.config.jax_disable_jit:  # arrays with shardings of their own, and nothing traced
            return self._sharded(call, entry)
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and ambient.size != self._mesh.size:
            raise MeshError(
                f'{call.signature.name} is compiled for a mesh of {self._mesh.size} devices, and is called '
                f'in a function for one of {ambient.size}, or under jax.set_mesh of one: call it outside'
            )
        if entry.key.any_explicit:
            reject_foreign_types(call, self._mesh)
        # For operations in the user's code that need a mesh in force.
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._sharded(call, entry)

    def _sharded(self, call: Call, entry: Entry) -> Any:
        outputs = self._outputs(call, entry)
        if entry.on_devices and is_compiled():
            outputs = constrain_to_devices(outputs, self._rules.mesh)
        if entry.outputs is None:
            entry.outputs = self._rules.outputs(outputs, call, entry.arguments)
        # The out_shardings of a jit change no types, and are ignored where it is traced.
        return apply_shardings(outputs, entry.outputs) if self._rules.any_explicit else outputs

    def _outputs(self, call: Call, entry: Entry) -> Any:
        # There are values instead of tracers under jax.disable_jit, and where JAX looks for a nan: then the
        # user's lines should run.
        traced = not [leaf for leaf in call.leaves if not isinstance(leaf, jax.core.Tracer)]
        if traced and entry.jaxpr is not None and entry.kinds == _kinds([*map(type_of, call.leaves)]):
            with self._context_entered():
                return jax.tree.unflatten(entry.out_tree, rewriting.eval_jaxpr(entry.jaxpr, call.leaves))
        constraints, flat_args = self._rules.constraints(call), call.flat_args
        inside, entry.batch, entry.pipelines, entry.partitioned = entry.arguments, None, None, None
        if constraints is not None:
            flat_args = call.with_leaves(apply_shardings(call.leaves, constraints))
            pairs = zip(constraints, entry.arguments, strict=True)
            inside = [then if now is None else now for now, then in pairs]
        if self._rules.partition_batch or self._rules.signature.has_explicit_batch:
            entry.batch = batch_of(self._rules, call, inside)
        pipeline = self._pipeline(entry)
        may_be_partitioned = entry.batch is not None or self._may_make_batch(inside)
        # Where jax.disable_jit is traced all the same (`lower`, jax.grad around it), a `jit` is no equation.
        if not may_be_partitioned or not traced or jax.config.jax_disable_jit:
            return self.run_users(flat_args)
        return self._partitioned(call, flat_args, entry, inside, pipeline)

    def _partitioned(
        self,
        call: Call,
        flat_args: Sequence[Any],
        entry: Entry,
        inside: Sequence[Any],
        pipeline: Pipeline | None,
    ) -> Any:
        """Traces a step and runs it partitioned along its batch, if it has one."""
        structure: Any = None

        def flat_function(*flat_args: Any) -> Any:
            nonlocal structure
            outputs = self.run_users(flat_args)
            structure = jax.tree.structure(outputs)
            return outputs

        users = self.as_users(flat_function, call.layout)
        jaxpr = jax.make_jaxpr(users, static_argnums=call.layout.static)(*flat_args)
        if entry.batch is None:
            entry.batch = batch_made_inside(call, inside, jaxpr)
        types = [kind for kind in (*jaxpr.in_avals, *jaxpr.out_avals) if is_opaque(kind)]
        if entry.batch is not None and types:
            entry.partitioned = partitioned.warn_types(self._rules.signature.name, types)
        if entry.batch is None or types:
            leaves = jax.tree.leaves([x for i, x in enumerate(flat_args) if i not in call.layout.static])
            return jax.tree.unflatten(structure, rewriting.eval_jaxpr(jaxpr, leaves))
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
        outputs = jax.tree.unflatten(structure, structs)
        entry.outputs = self._rules.outputs(outputs, call, entry.arguments)
        paths = [path_string(path) for path, _ in jax.tree.leaves_with_path(outputs)]
        options = self._rules.options.partitioning or self.helper.partitioning or DEFAULT
        results, entry.partitioned, loops = partitioned.run_partitioned(
            *(jaxpr, call, flat_args, inside, entry.outputs, paths, entry.batch, self._rules.mesh),
            entry.note_gradient,
            options,
            pipeline,
        )
        if pipeline is not None:
            entry.pipelines = Pipelines(loops, jaxpr)
        return jax.tree.unflatten(structure, results)

    def _may_make_batch(self, arguments: Sequence[Any]) -> bool:
        """Whether a function may make its batch: no argument is said to be one, and its state is sharded."""
        rules = self._rules
        pipeline = rules.options.pipeline
        if (
            pipeline is not None
            or rules.any_explicit
            or rules.signature.has_explicit_batch
            or not rules.partition_batch
        ):
            return False
        return any(to is not None and spec_axes(to.spec) for to in arguments)

    def _pipeline(self, entry: Entry) -> Pipeline | None:
        """Returns the pipelines that the user asks for; None if the axis of stages has one device."""
        pipeline, name = self._rules.options.pipeline, self._rules.signature.name
        if pipeline is None:
            return None
        if self._rules.any_explicit:
            raise StagesError(
                f'{name} has {pipeline}, and the mesh has Explicit axes, whose shardings are part of types\n'
                'What to do: make a mesh of Auto axes.'
            )
        if entry.batch is None:
            raise StagesError(
                f'{name} has {pipeline}, and none of its arguments is known to be the batch that passes '
                'through the stages\n'
                'What to do: shard it over mesh axes of several devices, such as '
                f'PartitionSpec({pipeline.axis!r}), and name it (batch_argnums, batch_argnames).'
            )

        from scalax._spmd.pipelines.find_pipelines import (
            has_several_stages,  # here, because few functions have pipelines
        )

        return pipeline if has_several_stages(dict(self._mesh.shape), pipeline) else None

    def run_inline(self, call: Call) -> Any:
        """Runs the user's function where it is called, by the types that mesh axes have there."""
        call_key(call)  # raises about leaves that are not arrays
        if jax.sharding.get_abstract_mesh().manual_axes:  # shapes are local, and shardings are the caller's
            return self.run_users(call.flat_args)
        mesh = retyped_mesh(self.helper.mesh)
        rules = FunctionRules(self.helper, call.signature, self._rules.options, mesh)
        arguments, constraints = rules.arguments(call), rules.constraints(call)
        leaves = apply_shardings(call.leaves, arguments)
        if constraints is not None:
            leaves = apply_shardings(leaves, constraints)
        outputs = self.run_users(call.with_leaves(leaves))
        outputs = apply_shardings(outputs, rules.outputs(outputs, call, arguments))
        devices = getattr(self.helper.mesh, 'devices', None)
        if devices is None or AxisType.Explicit in mesh.axis_types or not is_compiled():
            return outputs
        if not isinstance(mesh, Mesh):
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return constrain_to_devices(outputs, mesh)

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
        context = self._keep(active_helper.context_for(self.helper, self._names))
        return active_helper.activate(context, self._asked)

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
        if any_static:  # other values may lead through other code: only a misspelling is certain
            unused = [each for each in unused if near_names(each, seen)]
        if unused:
            listed = (
                '; '.join(f'{each!r} ({did_you_mean(each, seen)})' for each in unused)
                if seen
                else f'{", ".join(map(repr, unused))} (it asked for no other name)'
            )
            warn(
                f'{self._rules.signature.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {listed}',
                UnusedAnnotationWarning,
            )


def runs_inline(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a call is part of a function whose mesh axes have other types than those of *mesh*.

    As inside JAX's ``auto_axes``, ``explicit_axes`` and ``shard_map``, where shapes are local, too. It has
    no program.
    """
    ambient = jax.sharding.get_abstract_mesh()
    return not ambient.empty and (bool(ambient.manual_axes) or retyped_mesh(mesh) is not mesh)


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
