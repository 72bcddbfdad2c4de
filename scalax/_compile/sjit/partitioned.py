"""The trace of a call that is partitioned along the mesh axes of its batch (`scalax._spmd`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._compile.call.call_key import Call, Shardings
from scalax._jax.rewriting import bind_as_jit, lift_captured_tracers
from scalax._spmd.batch.batch_arguments import BatchArguments
from scalax._spmd.options import BatchPartitioning
from scalax._spmd.pipelines.config import Pipeline
from scalax._spmd.pipelines.summary import PipelinedLoops
from scalax._spmd.placements.result_states import ResultState, result_states
from scalax._spmd.step import PartitionedStep, StepArgument, StepResult, partition_step, run_step
from scalax._spmd.values import CannotPartition
from scalax.errors import PartitioningWarning, PipelineError, warn


def run_partitioned(
    jaxpr: Any,
    call: Call,
    flat_args: Sequence[Any],
    inputs: Shardings,
    outputs: Shardings,
    result_paths: Sequence[str],
    batch: BatchArguments,
    mesh: Mesh | AbstractMesh,
    on_gradient: Callable[[], None],
    options: BatchPartitioning,
    pipeline: Pipeline | None = None,
) -> tuple[Sequence[Any], PartitionedStep | str, PipelinedLoops]:
    """Partitions a step along its batch and runs it.

    A step that cannot be partitioned runs unchanged, with a warning.

    Args:
        jaxpr: the jaxpr of the step.
        call: the call.
        flat_args: its arguments, values of a trace.
        inputs: the sharding of each leaf of the arguments.
        outputs: the sharding of each leaf of the outputs.
        result_paths: the path of each leaf of the outputs.
        batch: the batch among the arguments.
        mesh: the active mesh, of Auto axes.
        on_gradient: called when JAX differentiates the step from outside.
        options: the user's options.
        pipeline: the user's pipeline, along an axis of several devices.

    Returns:
        The leaves of the outputs; the partitioned step, or the reason why the step is not partitioned; and
        its pipelines.
    """
    name = call.signature.name
    dynamic = [value for i, value in enumerate(flat_args) if i not in call.layout.static]
    closed_jaxpr, captured = lift_captured_tracers(jaxpr)
    values = jax.tree.leaves(dynamic) + captured
    axes = [axis for axis in mesh.axis_names if axis in batch.batch_axes]
    arguments = [
        StepArgument(_spec(sharding), is_batch=batch.example_dim(i) is not None, path=call.path(i))
        for i, sharding in enumerate(inputs)
    ]
    arguments += [StepArgument(None, is_batch=False, path='a value of an outer trace')] * len(captured)
    abstract_mesh = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    loops: list[Any] = []
    find_loops = None
    if pipeline is not None:
        axes = [*[axis for axis in axes if axis != pipeline.axis], pipeline.axis]
        arguments = [
            *_shard_over_stages(arguments, batch, axes, pipeline, abstract_mesh.shape[pipeline.axis])
        ]
        find_loops = functools.partial(_find_pipelines, batch, len(captured), abstract_mesh, pipeline, loops)
    try:
        states = result_states(
            closed_jaxpr, [None if x.is_batch else x.path for x in arguments], result_paths
        )
        results = [
            _step_result(_spec(sharding), state, arguments)
            for sharding, state in zip(outputs, states, strict=True)
        ]
        step = partition_step(
            closed_jaxpr, arguments, results, abstract_mesh, axes, options, find_pipelines=find_loops
        )
    except PipelineError:
        raise
    except CannotPartition as error:
        return bind_as_jit(closed_jaxpr, values, name), _warn(name, error), ()
    except Exception as error:  # noqa: BLE001 - a bug in the partitioner must not stop a program
        problem = CannotPartition(None, f'{type(error).__name__}: {error}')
        problem.__cause__ = error
        return bind_as_jit(closed_jaxpr, values, name), _warn(name, problem), ()

    @jax.custom_jvp
    def run(*values: Any) -> Sequence[Any]:
        return [*run_step(step, values, mesh, name)]

    @run.defjvp
    def jvp(values: Any, tangents: Any) -> Any:
        on_gradient()
        if pipeline is not None:
            raise PipelineError(
                'cannot differentiate through a pipelined function: every tick would save its activations\n'
                'What to do: take the gradient inside: helper.sjit(jax.value_and_grad(loss), pipeline=...).'
            )
        # The original jaxpr is differentiated: the gradient of an all-reduce would count once per device.
        return jax.jvp(lambda *values: [*bind_as_jit(closed_jaxpr, values, name)], values, tangents)

    return run(*values), step, loops


def _shard_over_stages(
    arguments: Sequence[StepArgument],
    batch: BatchArguments,
    axes: Sequence[str],
    pipeline: Pipeline,
    count: int,
) -> Iterator[StepArgument]:
    """Yields the arguments of a step with pipelines, with the batch sharded over the stages as well.

    Outside of the pipelines each stage then has a share of the examples. If the number of microbatches is
    not divisible by the number of stages, all stages have all examples.
    """
    for i, argument in enumerate(arguments):
        if not argument.is_batch or argument.spec is None:
            yield argument
            continue
        entries, dim = [*argument.spec], batch.example_dim(i)
        assert dim is not None
        names = [axis for axis in axes[:-1] if axis in batch.shardings[i][dim]]
        entries[dim] = (*names, pipeline.axis) if pipeline.num_microbatches % count == 0 else tuple(names)
        yield argument._replace(spec=PartitionSpec(*entries))


def _find_pipelines(
    batch: BatchArguments, captured: int, mesh: AbstractMesh, pipeline: Pipeline, loops: list[Any], jaxpr: Any
) -> tuple[Any, Mapping[int, Any]]:
    """Returns the jaxpr of a step, and the scans over layers that run as pipelines.

    Appends the pipelined loops to *loops*, for plans.
    """
    # Imported here, because few functions have pipelines.
    from scalax._spmd.pipelines.find_pipelines import find_pipelines

    unsharded = [()] * captured
    arguments = dataclasses.replace(
        batch, shardings=[*batch.shardings, *unsharded], state_shardings=[*batch.state_shardings, *unsharded]
    )
    jaxpr, pipelines, pipelined_loops = find_pipelines(jaxpr, arguments, dict(mesh.shape), pipeline)
    loops += pipelined_loops
    return jaxpr, pipelines


def warn_types(name: str, types: Sequence[Any]) -> str:
    """Warns that a step is not partitioned because it takes or returns values that are not arrays.

    Returns:
        The reason.
    """
    names = sorted({aval.__name__ if isinstance(aval, type) else type(aval).__name__ for aval in types})
    reason = f'it takes or returns values that are not arrays ({", ".join(names)})'
    return _warn(name, CannotPartition(None, reason, 'keep them outside of the step'))


def _warn(name: str, error: CannotPartition) -> str:
    """Warns that a step is not partitioned, and returns the reason."""
    from scalax._jaxpr.source_lines import line_of  # here, because hardly any step fails

    location = '' if error.equation is None else f' ({line_of(error.equation)})'
    remedy = f'{error.remedy}, or turn partitioning off with batch_argnums=()'
    if error.__cause__ is not None:
        remedy = 'report this, which is a bug in scalax; batch_argnums=() turns partitioning off'
    warn(
        f'{name} is not partitioned along its batch: {error.reason}{location}. It runs as jax.jit runs it, '
        f'and the compiler alone decides how activations are sharded.\nWhat to do: {remedy}.',
        PartitioningWarning,
    )
    return f'{error.reason}{location}'


def _spec(sharding: Any) -> Any:
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _step_result(
    spec: PartitionSpec | None, state: ResultState, arguments: Sequence[StepArgument]
) -> StepResult:
    """Returns the description of a result, which may be updated state, or a gradient of state."""
    path = arguments[state.arguments[0]].path if len(state.arguments) == 1 else None
    specs = {arguments[i].spec for i in state.arguments}
    return StepResult(spec, path, specs.pop() if len(specs) == 1 else None, state.distance)
