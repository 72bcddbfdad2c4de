"""Helpers of the partitioner's tests: partition a function, run it, and compare with one device."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from scalax._spmd.options import DEFAULT, BatchPartitioning
from scalax._spmd.step import PartitionedStep, StepArgument, StepResult, partition_step, run_step

P = PartitionSpec
FSDP = {'fsdp': 8}
HSDP = {'replica': 2, 'fsdp': 4}
TP = {'fsdp': 4, 'tp': 2}


def batch_spec(mesh: dict[str, int], dim: int = 0) -> PartitionSpec:
    """Returns a spec that shards a dimension over all axes of a mesh except tp."""
    return P(*[None] * dim, tuple([axis for axis in mesh if axis != 'tp']))


def state_spec(shape: Sequence[int], axis: str = 'fsdp', size: int = 8) -> PartitionSpec:
    """Returns the spec of state, whose largest divisible dimension is sharded."""
    dims = [dim for dim, dim_size in enumerate(shape) if dim_size % size == 0]
    return P(*[None] * max(dims, key=lambda dim: shape[dim]), axis) if dims else P()


def partitioned(
    fun: Callable[..., Any],
    state: Any,
    batch: Any,
    mesh_axes: dict[str, int] = FSDP,
    *,
    batch_dim: int = 0,
    result_specs: Sequence[PartitionSpec | None] | None = None,
    replicate: bool = False,
    specs: Sequence[PartitionSpec] | None = None,
    batch_specs: Sequence[PartitionSpec] | None = None,
    batch_axes: Sequence[str] | None = None,
    options: BatchPartitioning = DEFAULT,
) -> tuple[PartitionedStep, Callable[[], list[Any]]]:
    """Partitions a function of state and a batch, and returns the step and a function that runs it.

    Args:
        fun: the function.
        state: arrays, which are sharded over fsdp unless *replicate* is true.
        batch: arrays.
        mesh_axes: the mesh.
        batch_dim: the batch dimension.
        result_specs: the specs of the results; None leaves them to the partitioner.
        replicate: whether state is replicated.
        specs: the specs of the leaves of the state; None for the default.
        batch_specs: the specs of the leaves of the batch; None for the default.
        batch_axes: the mesh axes of the batch; None for all axes except tp.
        options: the user's options.
    """
    types = (AxisType.Auto,) * len(mesh_axes)
    mesh = jax.make_mesh(tuple(mesh_axes.values()), tuple(mesh_axes), axis_types=types)
    leaves, batch_leaves = jax.tree.leaves(state), jax.tree.leaves(batch)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    if specs is None:
        specs = [P() if replicate else state_spec(leaf.shape, size=mesh_axes['fsdp']) for leaf in leaves]
    if batch_specs is None:
        batch_specs = [batch_spec(mesh_axes, batch_dim)] * len(batch_leaves)
    arguments = [StepArgument(spec, False, path) for spec, path in zip(specs, paths, strict=True)]
    arguments += [StepArgument(spec, True, 'batch') for spec in batch_specs]
    axes = batch_axes or [axis for axis in mesh_axes if axis != 'tp']
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(fun)(state, batch)
        open_results = [None] * len(jaxpr.out_avals)
        names = [*paths, *[None] * len(open_results)]
        results = [StepResult(*pair) for pair in zip(result_specs or open_results, names, strict=False)]
        step = partition_step(jaxpr, arguments, results, mesh.abstract_mesh, axes, options)

    def run() -> list[Any]:
        def inside(*values: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return run_step(step, values, mesh, 'step')

        shardings = [jax.NamedSharding(mesh, argument.spec or P()) for argument in arguments]
        return [*jax.jit(inside)(*jax.device_put([*leaves, *batch_leaves], shardings))]

    return step, run


def with_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that returns the results of *fun*, and gradients for the state and the batch."""

    def both(state: Any, batch: Any) -> Any:
        def loss(state: Any, batch: Any) -> Any:
            results = fun(state, batch)
            inexact = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum([jnp.sum(jnp.sin(x)) for x in inexact], jnp.zeros(())), results

        return jax.grad(loss, (0, 1), has_aux=True)(state, batch)

    return both


def assert_equal(actual: Sequence[Any], expected: Any, tolerance: float = 1e-5) -> None:
    """Asserts that values are equal within rounding, and that integers and keys are equal."""
    for actual_value, expected_value in zip(actual, jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(expected_value.dtype, jnp.inexact):
            scale = max(1.0, float(jnp.abs(expected_value).max(initial=0)))
            np.testing.assert_allclose(actual_value / scale, expected_value / scale, rtol=0, atol=tolerance)
        else:
            np.testing.assert_array_equal(actual_value, expected_value)


def collectives(step: PartitionedStep) -> Counter[str]:
    """Counts how often a step runs each kind of collective for each reason."""
    counts: Counter[str] = Counter()
    for row in step.collective_rows:
        counts[f'{row.kind} {row.reason}'] += row.count
    return counts
