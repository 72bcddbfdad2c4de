"""A call whose step is partitioned along the axes of its batch (`scalax._spmd`)."""

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
from scalax.errors import PartitioningWarning, StagesError, warn


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
    """Returns the leaves of the outputs of a step, the step that each device runs, or why there is none, and
    its pipelines.

    A step that cannot be partitioned runs as it is, with a warning.

    Args:
        jaxpr: that of the step.
        call: the call.
        flat_args: its arguments, values of a trace.
        inputs: the shardings of the leaves of the arguments.
        outputs: those of the leaves of the outputs.
        result_paths: the paths of these.
        batch: what is known of the batch.
        mesh: a mesh of Auto axes, in force.
        on_gradient: called when JAX differentiates the step from outside.
        options: what the user chooses.
        pipeline: the pipelines that the user asks for, along an axis of several devices.
    """
    name = call.signature.name
    dynamic = [value for i, value in enumerate(flat_args) if i not in call.layout.static]
    closed, captured = lift_captured_tracers(jaxpr)
    values = jax.tree.leaves(dynamic) + captured
    axes = [axis for axis in mesh.axis_names if axis in batch.batch_axes]
    arguments = [
        StepArgument(_spec(to), is_batch=batch.example_dim(i) is not None, path=call.path(i))
        for i, to in enumerate(inputs)
    ]
    arguments += [StepArgument(None, is_batch=False, path='a value of an outer trace')] * len(captured)
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    loops: list[Any] = []
    find = None
    if pipeline is not None:
        axes = [*[axis for axis in axes if axis != pipeline.axis], pipeline.axis]
        arguments = [*_over_stages(arguments, batch, axes, pipeline, abstract.shape[pipeline.axis])]
        find = functools.partial(_pipelines, batch, len(captured), abstract, pipeline, loops)
    try:
        states = result_states(closed, [None if x.is_batch else x.path for x in arguments], result_paths)
        results = [_result(_spec(to), state, arguments) for to, state in zip(outputs, states, strict=True)]
        step = partition_step(closed, arguments, results, abstract, axes, options, find_pipelines=find)
    except StagesError:
        raise
    except CannotPartition as error:
        return bind_as_jit(closed, values, name), _warn(name, error), ()
    except Exception as error:  # noqa: BLE001 - a mistake of the partitioner must not end a program
        problem = CannotPartition(None, f'{type(error).__name__}: {error}')
        problem.__cause__ = error
        return bind_as_jit(closed, values, name), _warn(name, problem), ()

    @jax.custom_jvp
    def run(*values: Any) -> Sequence[Any]:
        return [*run_step(step, values, mesh, name)]

    @run.defjvp
    def differentiated(values: Any, tangents: Any) -> Any:
        on_gradient()
        if pipeline is not None:
            raise StagesError(
                'cannot differentiate through a pipelined function: every tick would save its activations\n'
                'What to do: take the gradient inside: helper.sjit(jax.value_and_grad(loss), pipeline=...).'
            )
        # What devices exchange is not differentiated: a sum over them would be counted once for each.
        return jax.jvp(lambda *values: [*bind_as_jit(closed, values, name)], values, tangents)

    return run(*values), step, loops


def _over_stages(
    arguments: Sequence[StepArgument],
    batch: BatchArguments,
    axes: Sequence[str],
    pipeline: Pipeline,
    count: int,
) -> Iterator[StepArgument]:
    """The arguments of a step with pipelines: each stage has a share of the batch outside of these, if
    microbatches divide by stages.
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


def _pipelines(
    batch: BatchArguments, captured: int, mesh: AbstractMesh, pipeline: Pipeline, loops: list[Any], jaxpr: Any
) -> tuple[Any, Mapping[int, Any]]:
    """The jaxpr of a step, and its loops over layers that run as pipelines; *loops* gets what plans say."""
    from scalax._spmd.pipelines.find_pipelines import (
        find_pipelines,  # here, because few functions have pipelines
    )

    more = [()] * captured
    known = dataclasses.replace(
        batch, shardings=[*batch.shardings, *more], state_shardings=[*batch.state_shardings, *more]
    )
    jaxpr, found, told = find_pipelines(jaxpr, known, dict(mesh.shape), pipeline)
    loops += told
    return jaxpr, found


def warn_types(name: str, types: Sequence[Any]) -> str:
    """Warns that a step is not partitioned because it takes or returns values that are no arrays.

    Returns:
        The reason.
    """
    what = ', '.join(
        sorted({kind.__name__ if isinstance(kind, type) else type(kind).__name__ for kind in types})
    )
    why = f'it takes or returns values that are no arrays ({what})'
    return _warn(name, CannotPartition(None, why, 'keep them outside of the step'))


def _warn(name: str, error: CannotPartition) -> str:
    """Warns that a step is not partitioned, and returns why."""
    from scalax._jaxpr.source_lines import line_of  # here, because hardly any step fails

    at = '' if error.equation is None else f' ({line_of(error.equation)})'
    remedy = f'{error.remedy}, or turn partitioning off with batch_argnums=()'
    if error.__cause__ is not None:
        remedy = 'report this, which is a bug in scalax; batch_argnums=() turns partitioning off'
    warn(
        f'{name} is not partitioned along its batch: {error.reason}{at}. It runs as jax.jit runs it, and '
        f'the compiler alone decides how activations are sharded.\nWhat to do: {remedy}.',
        PartitioningWarning,
    )
    return f'{error.reason}{at}'


def _spec(sharding: Any) -> Any:
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _result(spec: PartitionSpec | None, state: ResultState, arguments: Sequence[StepArgument]) -> StepResult:
    """Returns what is known of a result that is state, or the gradient of it."""
    path = arguments[state.arguments[0]].path if len(state.arguments) == 1 else None
    specs = {arguments[i].spec for i in state.arguments}
    return StepResult(spec, path, specs.pop() if len(specs) == 1 else None, state.distance)
