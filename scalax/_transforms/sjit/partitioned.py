"""A call whose step is partitioned along the axes of its batch (`scalax._spmd`), behind a switch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._follow.types import Arguments
from scalax._jax.rewriting import run_as_one, with_inputs
from scalax._spmd.step import Step, StepArgument, StepResult, partition_step, run_step
from scalax._spmd.values import CannotPartition
from scalax._transforms.calls.call import Call, Shardings
from scalax.errors import FollowingWarning, warn

SWITCHED_ON = os.environ.get('SCALAX_PARTITION') == '1'
"""Whether steps are partitioned by scalax itself."""


def run_partitioned(
    jaxpr: Any,
    call: Call,
    flat_args: Sequence[Any],
    inputs: Shardings,
    outputs: Shardings,
    batch: Arguments,
    mesh: Mesh | AbstractMesh,
) -> tuple[Sequence[Any], Step | None]:
    """Returns the leaves of the outputs of a step, and the step that each device runs.

    A step that cannot be partitioned runs as it is, with a warning.

    Args:
        jaxpr: that of the step.
        call: the call.
        flat_args: its arguments, values of a trace.
        inputs: the shardings of the leaves of the arguments.
        outputs: those of the leaves of the outputs.
        batch: what is known of the batch.
        mesh: a mesh of Auto axes, in force.
    """
    name = call.signature.name
    dynamic = [value for i, value in enumerate(flat_args) if i not in call.layout.static]
    closed, captured = with_inputs(jaxpr)
    values = jax.tree.leaves(dynamic) + captured
    axes = [axis for axis in mesh.axis_names if axis in batch.batch_axes]
    arguments = [
        StepArgument(_spec(to), is_batch=not all(map(batch.batch_axes.isdisjoint, trail)), path=call.path(i))
        for i, (to, trail) in enumerate(zip(inputs, batch.trails, strict=True))
    ]
    arguments += [StepArgument(None, is_batch=False, path='a value of an outer trace')] * len(captured)
    # Updated state comes in the order of the state.
    paths = dict[Any, list[str]]()
    for argument, leaf in zip(arguments, values, strict=True):
        paths.setdefault(_type(leaf), []).append(argument.path)
    results = []
    for i, (to, aval) in enumerate(zip(outputs, jaxpr.out_avals, strict=True)):
        left = paths.get(_type(aval))
        results.append(StepResult(_spec(to), left.pop(0) if left else f'output {i}'))
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    try:
        step = partition_step(closed, arguments, results, abstract, axes)
    except CannotPartition as error:
        _warn(name, error)
        return run_as_one(closed, values, name), None
    except Exception as error:  # noqa: BLE001 - a mistake of the partitioner must not end a program
        _warn(name, CannotPartition(None, f'{type(error).__name__}: {error}'))
        return run_as_one(closed, values, name), None

    @jax.custom_jvp
    def run(*values: Any) -> Sequence[Any]:
        return [*run_step(step, values, mesh, name)]

    @run.defjvp
    def differentiated(values: Any, tangents: Any) -> Any:
        # What devices exchange is not differentiated: a sum over them would be counted once for each.
        return jax.jvp(lambda *values: [*run_as_one(closed, values, name)], values, tangents)

    return run(*values), step


def _warn(name: str, error: CannotPartition) -> None:
    from scalax._jaxprs.source_lines import line_of  # here, because hardly any step fails

    at = '' if error.equation is None else f' ({line_of(error.equation)})'
    warn(
        f'{name} is not partitioned along its batch: {error.why}{at}. It runs as jax.jit runs it, and '
        'the compiler alone decides how activations are sharded.',
        FollowingWarning,
    )


def _spec(sharding: Any) -> Any:
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _type(leaf: Any) -> Any:
    return tuple(leaf.shape), str(leaf.dtype)
