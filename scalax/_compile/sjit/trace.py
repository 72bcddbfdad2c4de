"""Execution of a user's function with the helper's mesh and bindings active: traced, replayed, or inline.

Even on Auto axes, the type of an array on a mesh differs from the type of an array without a mesh. So the
same call is traced twice, with numpy arguments and with placed arguments. The second time the user's code
does not run again: the jaxpr of the first trace is replayed. A jaxpr may depend on everything in JAX's trace
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
from scalax._compile.sjit.find_batch import (
    TENSOR_PARALLEL,
    find_batch,
    find_batch_made_inside,
    without_batch_axes,
)
from scalax._compile.sjit.program_table import Pipelines, TraceCacheEntry
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
from scalax._spmd.batch.tensor_parallel_axes import tensor_parallel_axes
from scalax._spmd.options import DEFAULT
from scalax._spmd.pipelines.config import Pipeline
from scalax.errors import (
    MeshError,
    PipelineError,
    UnusedAnnotationWarning,
    did_you_mean,
    near_names,
    plural,
    warn,
)
from scalax.interop._lost_updates import ModuleUpdates


def record(entry: TraceCacheEntry, traced: jax.stages.Traced) -> None:
    """Stores the outputs' structure and the jaxpr of the first trace of a key."""
    entry.out_tree = traced.out_tree
    # Values of an outer trace that the function closes over are additional inputs of the jaxpr. They cannot
    # be used after that trace, so the jaxpr is not stored.
    if len(traced.jaxpr.in_avals) == len(entry.key.types):
        entry.jaxpr, entry.value_kinds = traced.jaxpr, _value_kinds(traced.jaxpr.in_avals)


def _value_kinds(avals: Sequence[Any]) -> list[Any]:
    """Returns the properties of types that are not in the `CallKey`, but on which a trace may depend."""
    # A trace may depend on other properties of an opaque type. A new object is unequal to all others.
    return [
        (type(aval).__name__, memory_space(aval))
        if isinstance(aval, jax.core.ShapedArray) or not is_opaque(aval)
        else object()
        for aval in avals
    ]


class TracedFunction:
    """Runs the user's function while JAX traces it, replays its jaxpr, or runs it inline.

    Args:
        helper: the helper of the mesh.
        fun: the user's function.
        rules: the rules of the function.

    The helper and the function are held weakly. Callers hold strong references.
    """

    def __init__(
        self, helper: active_helper.MeshOwner, fun: Callable[..., Any], rules: FunctionRules
    ) -> None:
        self._helper, self._fun, self._rules = weakref.ref(helper), _weak_reference(fun), rules
        self._source = _source_of(fun)
        mesh = rules.mesh
        self._mesh = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        self._bindings = rules.options.annotation_shardings
        self._used_names: set[str] = set()  # names of annotations in the function
        # Keeps contexts alive, because JAX finds traces by the identity of their context.
        self._cached_context = functools.lru_cache(maxsize=lru_cache.SIZE)(lambda context: context)
        self._warned = False

    @property
    def helper(self) -> active_helper.MeshOwner:
        """The helper of the mesh."""
        helper = self._helper()
        assert helper is not None
        return helper

    def run(self, call: Call, entry: TraceCacheEntry) -> Any:
        """Returns the outputs of a call, and records their shardings and the partitioning in *entry*."""
        if jax.config.jax_disable_jit:  # the arguments are arrays with shardings, and nothing is traced
            return self._run_sharded(call, entry)
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and ambient.size != self._mesh.size:
            raise MeshError(
                f'{call.signature.name} was compiled for a mesh of {plural(self._mesh.size, "device")}, but '
                f'is called under a mesh of {plural(ambient.size, "device")} (an enclosing function, or '
                'jax.set_mesh): call it outside of that'
            )
        if entry.key.any_explicit:
            reject_foreign_types(call, self._mesh)
        # Some operations in the user's code need an active mesh.
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._run_sharded(call, entry)

    def _run_sharded(self, call: Call, entry: TraceCacheEntry) -> Any:
        outputs = self._run_or_replay(call, entry)
        if entry.constrains_outputs and is_compiled():
            outputs = constrain_to_devices(outputs, self._rules.mesh)
        if entry.output_shardings is None:
            entry.output_shardings = self._rules.outputs(outputs, call, entry.argument_shardings)
        # The out_shardings of a jit do not change types, and JAX ignores them inside another trace.
        return apply_shardings(outputs, entry.output_shardings) if self._rules.any_explicit else outputs

    def _run_or_replay(self, call: Call, entry: TraceCacheEntry) -> Any:
        # Under jax.disable_jit, and when JAX searches for a nan, the leaves are values, not tracers, and
        # the user's code must run.
        traced = not [leaf for leaf in call.leaves if not isinstance(leaf, jax.core.Tracer)]
        if (
            traced
            and entry.jaxpr is not None
            and entry.value_kinds == _value_kinds([*map(type_of, call.leaves)])
        ):
            with self._active_context():
                return jax.tree.unflatten(entry.out_tree, rewriting.eval_jaxpr(entry.jaxpr, call.leaves))
        constraints, flat_args = self._rules.constraints(call), call.flat_args
        inner_shardings, entry.batch, entry.pipelines, entry.partitioned = (
            entry.argument_shardings,
            None,
            None,
            None,
        )
        if constraints is not None:
            flat_args = call.with_leaves(apply_shardings(call.leaves, constraints))
            pairs = zip(constraints, entry.argument_shardings, strict=True)
            inner_shardings = [
                sharding if constraint is None else constraint for constraint, sharding in pairs
            ]
        if self._rules.partition_batch or self._rules.signature.has_explicit_batch:
            entry.batch = find_batch(self._rules, call, inner_shardings)
        pipeline = self._pipeline(entry)
        may_be_partitioned = entry.batch is not None or self._may_make_batch(inner_shardings)
        # Even under jax.disable_jit `lower` and jax.grad trace the function, but without `jit` equations.
        if not may_be_partitioned or not traced or jax.config.jax_disable_jit:
            return self.run_user_function(flat_args)
        return self._run_partitioned(call, flat_args, entry, inner_shardings, pipeline)

    def _run_partitioned(
        self,
        call: Call,
        flat_args: Sequence[Any],
        entry: TraceCacheEntry,
        inner_shardings: Sequence[Any],
        pipeline: Pipeline | None,
    ) -> Any:
        """Traces a step and runs it partitioned along its batch, if it has one."""
        out_tree: Any = None

        def flat_function(*flat_args: Any) -> Any:
            nonlocal out_tree
            outputs = self.run_user_function(flat_args)
            out_tree = jax.tree.structure(outputs)
            return outputs

        named_function = self.with_user_metadata(flat_function, call.layout)
        jaxpr = jax.make_jaxpr(named_function, static_argnums=call.layout.static)(*flat_args)
        if entry.batch is None:
            entry.batch = find_batch_made_inside(call, inner_shardings, jaxpr)
        elif pipeline is None and (axes := tensor_parallel_axes(jaxpr, entry.batch, self._mesh.shape)):
            entry.batch = without_batch_axes(call, entry.batch, inner_shardings, axes)
            entry.partitioned = TENSOR_PARALLEL if entry.batch is None else None
        opaque_avals = [aval for aval in (*jaxpr.in_avals, *jaxpr.out_avals) if is_opaque(aval)]
        if entry.batch is not None and opaque_avals:
            entry.partitioned = partitioned.warn_types(self._rules.signature.name, opaque_avals)
        if entry.batch is None or opaque_avals:
            leaves = jax.tree.leaves([x for i, x in enumerate(flat_args) if i not in call.layout.static])
            return jax.tree.unflatten(out_tree, rewriting.eval_jaxpr(jaxpr, leaves))
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
        outputs = jax.tree.unflatten(out_tree, structs)
        entry.output_shardings = self._rules.outputs(outputs, call, entry.argument_shardings)
        paths = [path_string(path) for path, _ in jax.tree.leaves_with_path(outputs)]
        options = self._rules.options.partitioning or self.helper.partitioning or DEFAULT
        results, entry.partitioned, loops = partitioned.run_partitioned(
            *(
                jaxpr,
                call,
                flat_args,
                inner_shardings,
                entry.output_shardings,
                paths,
                entry.batch,
                self._rules.mesh,
            ),
            entry.record_gradient,
            options,
            pipeline,
        )
        if pipeline is not None:
            entry.pipelines = Pipelines(loops, jaxpr)
        return jax.tree.unflatten(out_tree, results)

    def _may_make_batch(self, shardings: Sequence[Any]) -> bool:
        """Whether a function may make its batch: the user names no batch, and its arguments are sharded."""
        rules = self._rules
        pipeline = rules.options.pipeline
        if (
            pipeline is not None
            or rules.any_explicit
            or rules.signature.has_explicit_batch
            or not rules.partition_batch
        ):
            return False
        return any(sharding is not None and spec_axes(sharding.spec) for sharding in shardings)

    def _pipeline(self, entry: TraceCacheEntry) -> Pipeline | None:
        """Returns the user's pipeline, or None if the axis of the stages has a single device."""
        pipeline, name = self._rules.options.pipeline, self._rules.signature.name
        if pipeline is None:
            return None
        if self._rules.any_explicit:
            raise PipelineError(
                f'{name} has {pipeline}, and the mesh has Explicit axes, whose shardings are part of types\n'
                'What to do: make a mesh of Auto axes.'
            )
        if entry.batch is None:
            raise PipelineError(
                f'{name} has {pipeline}, and none of its arguments is known to be the batch that passes '
                'through the stages\n'
                'What to do: shard it over mesh axes of several devices, such as '
                f'PartitionSpec({pipeline.axis!r}), and name it (batch_argnums, batch_argnames).'
            )

        # Imported here, because few functions have pipelines.
        from scalax._spmd.pipelines.find_pipelines import has_several_stages

        return pipeline if has_several_stages(dict(self._mesh.shape), pipeline) else None

    def run_inline(self, call: Call) -> Any:
        """Runs the user's function in the trace of its caller, with the caller's types of mesh axes."""
        call_key(call)  # raises about leaves that are not arrays
        if jax.sharding.get_abstract_mesh().manual_axes:  # shapes are local, and the caller chose shardings
            return self.run_user_function(call.flat_args)
        mesh = retyped_mesh(self.helper.mesh)
        rules = FunctionRules(self.helper, call.signature, self._rules.options, mesh)
        arguments, constraints = rules.arguments(call), rules.constraints(call)
        leaves = apply_shardings(call.leaves, arguments)
        if constraints is not None:
            leaves = apply_shardings(leaves, constraints)
        outputs = self.run_user_function(call.with_leaves(leaves))
        outputs = apply_shardings(outputs, rules.outputs(outputs, call, arguments))
        devices = getattr(self.helper.mesh, 'devices', None)
        if devices is None or AxisType.Explicit in mesh.axis_types or not is_compiled():
            return outputs
        if not isinstance(mesh, Mesh):
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return constrain_to_devices(outputs, mesh)

    def run_user_function(self, flat_args: Sequence[Any]) -> Any:
        """Calls the user's function with the bindings of annotations active."""
        with self._active_context():
            args, keywords = self._rules.signature.restore(flat_args)
            fun = self._fun()
            assert fun is not None  # callers hold it
            if 'flax.nnx' not in sys.modules:
                return fun(*args, **keywords)
            updates = ModuleUpdates(sys.modules['flax.nnx'], (args, keywords))
            outputs = fun(*args, **keywords)
            updates.warn_lost(self._rules.signature.name, outputs)
            return outputs

    def _active_context(self) -> Any:
        context = self._cached_context(active_helper.context_for(self.helper, self._bindings))
        return active_helper.activate(context, self._used_names)

    def with_user_metadata(self, flat_function: Callable[..., Any], layout: CallLayout) -> Callable[..., Any]:
        """Gives a function of slots the user's name, parameters and source, which JAX's messages show."""
        flat_function.__name__ = flat_function.__qualname__ = self._rules.signature.name
        flat_function.__dict__['__signature__'] = layout.flat_signature
        flat_function.__dict__['__wrapped__'] = self._source
        return flat_function

    def warn_unused(self, *, any_static: bool) -> None:
        """Warns, once, about bound names that the function does not use.

        Args:
            any_static: whether there are static arguments. For other static values the function may use more
                names, so that only names that look misspelled are reported.
        """
        if self._warned or not self._bindings:
            return
        self._warned = True
        unbound = sorted(self._used_names - self._bindings.keys())
        unused = sorted(self._bindings.keys() - self._used_names)
        if any_static:
            unused = [name for name in unused if near_names(name, unbound)]
        if unused:
            listed = (
                '; '.join(f'{name!r} ({did_you_mean(name, unbound)})' for name in unused)
                if unbound
                else f'{", ".join(map(repr, unused))} (it asked for no other name)'
            )
            warn(
                f'{self._rules.signature.name}: annotation_shardings binds names that no '
                f'with_sharding_annotation in it used: {listed}',
                UnusedAnnotationWarning,
            )


def runs_inline(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a call runs inline, because its caller uses other types for the axes of *mesh*.

    This is so inside JAX's ``auto_axes``, ``explicit_axes`` and ``shard_map``. The call has no program.
    """
    ambient = jax.sharding.get_abstract_mesh()
    return not ambient.empty and (bool(ambient.manual_axes) or retyped_mesh(mesh) is not mesh)


def _weak_reference(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    try:
        return weakref.ref(fun)
    except TypeError:  # some types of other libraries do not support weak references
        return lambda: fun


def _source_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the source of *fun*, but without its globals, defaults and closure."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    code = getattr(inspect.unwrap(fun), '__code__', None)
    if not isinstance(code, types.CodeType):
        return _no_source
    return types.FunctionType(code, {}, closure=tuple([types.CellType() for _ in code.co_freevars]))


def _no_source() -> None:
    """Stands for functions without Python source."""
