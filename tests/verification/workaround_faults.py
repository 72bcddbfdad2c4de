"""Steps that are wrong because a workaround for XLA is faulty or missing."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

from scalax._compile.sjit import dispatch
from scalax.sharding import MeshShardingHelper
from tests.verification.fault import Step, seeded
from tests.verification.partitioner_faults import conv_gradient, depthwise_gradient


def alone(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the local value, in place of a collective."""
    return value


def twice(value: Any, axes: Any) -> Any:
    """Sums over devices twice."""
    return parallel_sum(parallel_sum(value, axes), axes)


parallel_sum = lax.psum


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', alone))
def convolution_gradient_without_its_sum(helper: MeshShardingHelper) -> Step:
    """A missing sum: the gradient of a depthwise convolution covers only the local rows."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', twice))
def convolution_gradient_summed_twice(helper: MeshShardingHelper) -> Step:
    """A doubled sum: the gradient of a depthwise convolution is summed again after its all-reduce."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (dispatch, 'apply_workarounds', lambda jaxpr, *_, **__: jaxpr))
def convolution_gradient_without_the_workaround(helper: MeshShardingHelper) -> Step:
    """A missing workaround: the gradient of a depthwise convolution, as XLA partitions it."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args
