"""Steps that are wrong where a workaround for XLA has a mistake in it, or is missing."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

from scalax._compile.sjit import dispatch
from scalax.sharding import MeshShardingHelper
from tests.verification.fault import Step, seeded
from tests.verification.partitioner_faults import conv_gradient, depthwise_gradient


def alone(value: Any, *args: Any, **kwargs: Any) -> Any:
    """The value of a device, of which a collective would make that of all."""
    return value


def twice(value: Any, axes: Any) -> Any:
    """What is added up over devices, and then once more."""
    return parallel_sum(parallel_sum(value, axes), axes)


parallel_sum = lax.psum


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', alone))
def mended_convolution_without_its_sum(helper: MeshShardingHelper) -> Step:
    """A missing sum: the gradient of a depthwise convolution is that of a device's own rows."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', twice))
def mended_convolution_summed_up_twice(helper: MeshShardingHelper) -> Step:
    """A doubled sum: the same gradient, added up over devices that have it already."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (dispatch, 'apply_workarounds', lambda jaxpr, *_, **__: jaxpr))
def convolution_that_is_not_mended(helper: MeshShardingHelper) -> Step:
    """The gradient of a depthwise convolution as XLA has it."""
    _, args = conv_gradient(helper, 16)
    return helper.sjit(depthwise_gradient, in_shardings=(P(), P('fsdp'))), args
