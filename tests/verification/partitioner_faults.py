"""Steps that XLA's partitioner compiles to wrong programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.sharding import MeshShardingHelper
from tests.verification.fault import (
    FSDP,
    Step,
    integers,
    jitted,
    normal,
    partitioner,
)


def grouped(images: Any, kernel: Any, groups: int, out: str = 'NHWC') -> Any:
    numbers = ('NHWC', 'HWIO', out)
    return lax.conv_general_dilated(
        images, kernel, (1, 1), 'SAME', dimension_numbers=numbers, feature_group_count=groups
    )


def conv_gradient(helper: MeshShardingHelper, groups: int) -> Step:
    def step(params: Any, images: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.sum(jnp.sin(grouped(images, params['kernel'], groups)))

        return jax.grad(loss)(params)

    args = {'kernel': normal(3, 3, 16 // groups, 16)}, normal(16, 8, 8, 16)
    return jitted(helper, step, P(), P('fsdp')), args


def depthwise_gradient(params: Any, images: Any) -> Any:
    return jax.grad(lambda params: jnp.sum(jnp.sin(grouped(images, params['kernel'], 16))))(params)


@partitioner(('kernel', 'conv_general_dilated'))
def gradient_of_a_depthwise_convolution(helper: MeshShardingHelper) -> Step:
    """Too large by the number of devices that hold a copy of the same images."""
    return conv_gradient(helper, 16)


@partitioner(('kernel', 'conv_general_dilated'))
def gradient_of_a_grouped_convolution(helper: MeshShardingHelper) -> Step:
    """With four groups of channels, too large by the same factor."""
    return conv_gradient(helper, 4)


@partitioner(('conv_general_dilated',), mesh=FSDP)
def depthwise_convolution_with_a_sharded_kernel(helper: MeshShardingHelper) -> Step:
    """Output channels are mixed up if the kernel is sharded over them."""

    def step(kernel: Any, images: Any) -> Any:
        return grouped(images, kernel, 16, 'NCHW')

    return jitted(helper, step, P(None, None, None, 'fsdp'), P()), (normal(3, 3, 1, 16), normal(16, 8, 8, 16))


@partitioner(('dynamic_update_slice',), source='https://github.com/openxla/xla/issues/49118', mesh=FSDP)
def row_written_out_of_bounds(helper: MeshShardingHelper) -> Step:
    """One device clamps the write to the last row. On a mesh, the write is dropped."""

    def step(cache: Any, row: Any, number: Any) -> Any:
        return lax.dynamic_update_slice(cache, row, (number, 0))

    rows = NamedSharding(helper.mesh, P('fsdp'))
    step = jitted(helper, step, P('fsdp'), P(), P(), out_shardings=rows)
    return step, (normal(16, 4), 3 * normal(1, 4), np.int32(17))


@partitioner(
    ('dynamic_slice',), source='https://github.com/openxla/xla/issues/49122', mesh=FSDP, fixed_in='0.12.0'
)
def rows_read_out_of_bounds(helper: MeshShardingHelper) -> Step:
    """Each device reads the last rows of the array instead of its shard of the slice."""

    def step(x: Any, number: Any) -> Any:
        return lax.dynamic_slice(x, (number, 0), (16, 4))

    rows = NamedSharding(helper.mesh, P('fsdp'))
    return jitted(helper, step, P(), P(), out_shardings=rows), (normal(24, 4), np.int32(11))


@partitioner(('scatter',), source='https://github.com/jax-ml/jax/issues/18434', fixed_in='0.12.0')
def rows_shifted_by_one(helper: MeshShardingHelper) -> Step:
    """The second-to-last row gets the new value of the last row."""

    def step(x: Any, row: Any) -> Any:
        return x.at[:-1].set(x[1:]).at[-1].set(row)

    return jitted(helper, step, P('fsdp', 'tp'), P()), (normal(16, 16), normal(16))


@partitioner(('table', 'scatter-add'), source='https://github.com/openxla/xla/issues/42481', explicit=True)
def gradient_of_a_lookup_in_a_table_with_reduced_axes(helper: MeshShardingHelper) -> Step:
    """Devices slice their shard of the vocabulary before the gradient is summed over devices."""

    def step(params: Any, tokens: Any, expected: Any) -> Any:
        def loss(params: Any) -> Any:
            table = jax.sharding.reshard(params['table'], P('tp', None, reduced={'fsdp'}))
            embedded = table.at[tokens].get(out_sharding=P('fsdp', 'tp', None))
            return jnp.sum(embedded * expected)

        return jax.grad(loss)(params)

    args = {'table': normal(16, 4)}, integers(8, 8, 8), normal(8, 8, 4)
    return helper.sjit(step, in_shardings=(P(), P('fsdp', 'tp'), P('fsdp', 'tp'))), args


def next_token_gradient(params: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        logits = params['embedding'][tokens[:, :-1]] @ params['embedding'].T
        right = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(right)

    return jax.grad(loss)(params)


NEXT_TOKEN = {'embedding': normal(16, 8)}, integers(16, 8, 8)
SEQUENCE: dict[str, int] = {'fsdp': 2, 'sp': 2, 'tp': 2}


@partitioner(('embedding', 'scatter-add'), mesh=SEQUENCE)
def gradient_of_a_next_token_loss(helper: MeshShardingHelper) -> Step:
    """`tokens[:, :-1]` is sharded along the sequence. Its odd length is padded, and sums include the padding.

    XLA sums values in the padding if some mesh axis does not shard the tokens.
    """
    return jitted(helper, next_token_gradient, P(), P('fsdp', 'sp')), NEXT_TOKEN


def counts_but_the_last(groups: Any) -> Any:
    return jnp.bincount(groups[:-1], length=8)


@partitioner(('scatter-add',))
def counts_of_all_elements_but_the_last(helper: MeshShardingHelper) -> Step:
    """`groups[:-1]` has an odd length, and the counts include its padding."""
    return jitted(helper, counts_but_the_last, P('fsdp')), (integers(8, 16),)


def largest_but_the_first(x: Any, groups: Any) -> Any:
    return jax.ops.segment_max(x[1:], groups[1:], 4)


GROUPS = normal(16, 4) - 3, integers(4, 16)


@partitioner(('scatter-max',))
def maximum_of_each_group_but_the_first(helper: MeshShardingHelper) -> Step:
    """`x[1:]` has an odd length, and the maxima include its padding."""
    return jitted(helper, largest_but_the_first, P('tp'), P('tp')), GROUPS


def _conv(images: Any, kernel: Any) -> Any:
    numbers = ('NHWC', 'HWIO', 'NHWC')
    return lax.conv_general_dilated(images, kernel, (1, 1), 'SAME', dimension_numbers=numbers)


@partitioner(('kernel', 'conv_general_dilated'))
def gradient_of_a_convolution_sharded_by_height(helper: MeshShardingHelper) -> Step:
    """Too large by the number of devices that hold a copy of the same images, even without groups."""

    def step(params: Any, images: Any) -> Any:
        return jax.grad(lambda params: jnp.sum(jnp.sin(_conv(images, params['kernel']))))(params)

    args = {'kernel': normal(3, 3, 4, 8)}, normal(4, 8, 8, 4)
    return helper.sjit(step, in_shardings=(P(), P(None, 'tp'))), args


@partitioner(('conv_general_dilated',))
def convolution_sharded_by_height_and_channels(helper: MeshShardingHelper) -> Step:
    """Too large by the number of shards of the kernel's channels."""

    def step(kernel: Any, images: Any) -> Any:
        return _conv(images, kernel)

    args = normal(3, 3, 4, 8), normal(4, 8, 8, 4)
    return helper.sjit(step, in_shardings=(P(None, None, None, 'fsdp'), P(None, 'tp'))), args


@partitioner(('images', 'select_and_scatter_add'))
def gradient_of_a_max_pool_sharded_by_height(helper: MeshShardingHelper) -> Step:
    """Wrong for windows that overlap the rows of two devices."""

    def step(images: Any) -> Any:
        def loss(images: Any) -> Any:
            window = (1, 3, 3, 1)
            pooled = lax.reduce_window(images['images'], -jnp.inf, lax.max, window, (1, 1, 1, 1), 'SAME')
            return jnp.sum(jnp.sin(pooled))

        return jax.grad(loss)(images)

    return helper.sjit(step, in_shardings=(P('fsdp', 'tp'),)), ({'images': normal(4, 8, 8, 4)},)
