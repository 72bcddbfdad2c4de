"""Steps that compute another value on a mesh than on one device, each with why, and steps that do not.

Each is what a user has: a step and its arguments, made for a helper. A helper whose mesh axes all have size 1
makes the side that is right. The faults come from three places: XLA's partitioner, scalax's own pass (seeded:
`Fault.seeded` puts them in), and the code of users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._follow import (
    accumulations,
    follow,
    loops_over_rows,
    matrices,
    operands,
    orders,
    rows_by_number,
    run,
)
from scalax._follow.trail import spec_of
from scalax._jax import kernels
from scalax._jaxprs import dims
from scalax._transforms.sjit import dispatch
from scalax.custom_op import sharded_op
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and its arguments."""
Kind = Literal['partitioner', 'pass', 'user', 'sound']

FSDP_TP: Mapping[str, int] = {'fsdp': 4, 'tp': 2}
FSDP: Mapping[str, int] = {'fsdp': 8}
WHOLE = P()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A step that is wrong on a mesh, or one of `SOUND`, which is right.

    Attributes:
        name: its name.
        make: makes the step and its arguments for a helper.
        kind: whose fault it is.
        expects: what a report must name: paths of results, and operations.
        source: where it was published; empty for what nobody has.
        mesh: the axes of the mesh, and their sizes.
        explicit: whether the axes are Explicit.
        mended_in: the first jaxlib that does not have it any more; empty if all have it.
        seeded: puts the fault in, for those of the pass.
        raises: what the error says that it ends with, on one device as well; empty if it ends with none.
    """

    name: str
    make: Callable[[MeshShardingHelper], Step]
    kind: Kind
    expects: tuple[str, ...]
    source: str = ''
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: FSDP_TP)
    explicit: bool = False
    mended_in: str = ''
    seeded: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    raises: str = ''

    @property
    def shows(self) -> bool:
        """Whether the jaxlib that is installed has it."""
        return not self.mended_in or _numbers(jaxlib.__version__) < _numbers(self.mended_in)

    @property
    def is_seeded(self) -> bool:
        """Whether it is there only while `seeded` puts it in."""
        return self.seeded is not contextlib.nullcontext

    def helper(self) -> MeshShardingHelper:
        """The helper of its mesh."""
        return self._helper([*self.mesh.values()])

    def one_device(self) -> MeshShardingHelper:
        """A helper of the same axes, all of size 1."""
        return self._helper([1] * len(self.mesh))

    def _helper(self, sizes: list[int]) -> MeshShardingHelper:
        axis_type = AxisType.Explicit if self.explicit else AxisType.Auto
        devices = jax.devices()[: math.prod(sizes)]
        return MeshShardingHelper(sizes, [*self.mesh], devices=devices, axis_types=axis_type)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple([int(each) for each in version.split('.') if each.isdigit()])


FAULTS: dict[str, Fault] = {}
SOUND: dict[str, Fault] = {}
"""Steps that are right: their results differ by rounding, which may be all there is of them."""


def fault(kind: Kind, expects: tuple[str, ...], **options: Any) -> Callable[[Any], Any]:
    """Adds a fault that is named as the function that makes its step."""

    def added(make: Callable[[MeshShardingHelper], Step]) -> Callable[[MeshShardingHelper], Step]:
        name = make.__name__
        found = SOUND if kind == 'sound' else FAULTS
        assert name not in found, name
        found[name] = Fault(name, make, kind, expects, **options)
        return make

    return added


partitioner = functools.partial(fault, 'partitioner')
user = functools.partial(fault, 'user')
sound = functools.partial(fault, 'sound', ())


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal random numbers, the same for a shape and a seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def integers(most: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Random integers below a number, the same for a shape and a seed."""
    return np.random.default_rng([seed, most, *shape]).integers(0, most, size=shape).astype(np.int32)


def jitted(helper: MeshShardingHelper, fun: Callable[..., Any], *specs: P, **options: Any) -> Any:
    """`jax.jit` with shardings on the helper's mesh."""
    given = tuple([NamedSharding(helper.mesh, spec) for spec in specs])
    return jax.jit(fun, in_shardings=given, **options)


# XLA's partitioner


def _grouped(images: Any, kernel: Any, groups: int, out: str = 'NHWC') -> Any:
    numbers = ('NHWC', 'HWIO', out)
    return lax.conv_general_dilated(
        images, kernel, (1, 1), 'SAME', dimension_numbers=numbers, feature_group_count=groups
    )


def _conv_gradient(helper: MeshShardingHelper, groups: int) -> Step:
    def step(params: Any, images: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.sum(jnp.sin(_grouped(images, params['kernel'], groups)))

        return jax.grad(loss)(params)

    args = {'kernel': normal(3, 3, 16 // groups, 16)}, normal(16, 8, 8, 16)
    return jitted(helper, step, P(), P('fsdp')), args


@partitioner(('kernel', 'conv_general_dilated'))
def gradient_of_a_depthwise_convolution(helper: MeshShardingHelper) -> Step:
    """As many times too large as devices have the same rows."""
    return _conv_gradient(helper, 16)


@partitioner(('kernel', 'conv_general_dilated'))
def gradient_of_a_grouped_convolution(helper: MeshShardingHelper) -> Step:
    """The same of four groups of four channels."""
    return _conv_gradient(helper, 4)


@partitioner(('conv_general_dilated',), mesh=FSDP)
def depthwise_convolution_laid_out_unlike_its_images(helper: MeshShardingHelper) -> Step:
    """Its channels are mixed up where its kernel is split over them."""

    def step(kernel: Any, images: Any) -> Any:
        return _grouped(images, kernel, 16, 'NCHW')

    return jitted(helper, step, P(None, None, None, 'fsdp'), P()), (normal(3, 3, 1, 16), normal(16, 8, 8, 16))


@partitioner(('dynamic_update_slice',), source='https://github.com/openxla/xla/issues/49118', mesh=FSDP)
def row_written_out_of_bounds(helper: MeshShardingHelper) -> Step:
    """One device writes the last row, and no device of a mesh any."""

    def step(cache: Any, row: Any, number: Any) -> Any:
        return lax.dynamic_update_slice(cache, row, (number, 0))

    rows = NamedSharding(helper.mesh, P('fsdp'))
    step = jitted(helper, step, P('fsdp'), P(), P(), out_shardings=rows)
    return step, (normal(16, 4), 3 * normal(1, 4), np.int32(17))


@partitioner(
    ('dynamic_slice',), source='https://github.com/openxla/xla/issues/49122', mesh=FSDP, mended_in='0.12.0'
)
def rows_read_out_of_bounds(helper: MeshShardingHelper) -> Step:
    """Each device reads the last rows that there are, and not its own part of them."""

    def step(x: Any, number: Any) -> Any:
        return lax.dynamic_slice(x, (number, 0), (16, 4))

    rows = NamedSharding(helper.mesh, P('fsdp'))
    return jitted(helper, step, P(), P(), out_shardings=rows), (normal(24, 4), np.int32(11))


@partitioner(('scatter',), source='https://github.com/jax-ml/jax/issues/18434', mended_in='0.12.0')
def rows_moved_up_by_one(helper: MeshShardingHelper) -> Step:
    """The last but one row is the last one's new value."""

    def step(x: Any, row: Any) -> Any:
        return x.at[:-1].set(x[1:]).at[-1].set(row)

    return jitted(helper, step, P('fsdp', 'tp'), P()), (normal(16, 16), normal(16))


@partitioner(('table', 'scatter-add'), source='https://github.com/openxla/xla/issues/42481', explicit=True)
def gradient_of_a_lookup_in_a_reduced_table(helper: MeshShardingHelper) -> Step:
    """Devices slice their part of the vocabulary before they add up what others have of it."""

    def step(params: Any, tokens: Any, wanted: Any) -> Any:
        def loss(params: Any) -> Any:
            table = jax.sharding.reshard(params['table'], P('tp', None, reduced={'fsdp'}))
            found = table.at[tokens].get(out_sharding=P('fsdp', 'tp', None))
            return jnp.sum(found * wanted)

        return jax.grad(loss)(params)

    args = {'table': normal(16, 4)}, integers(8, 8, 8), normal(8, 8, 4)
    return helper.sjit(step, in_shardings=(P(), P('fsdp', 'tp'), P('fsdp', 'tp'))), args


@partitioner(('embedding', 'scatter-add'), mesh={'fsdp': 2, 'sp': 2, 'tp': 2})
def gradient_of_the_next_token_loss(helper: MeshShardingHelper) -> Step:
    """Tokens are split by sequence, and all but the last one are looked up: an odd number of them.

    XLA pads them, and adds up what is in the padding where some axis has no part of the tokens.
    """

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = params['embedding'][tokens[:, :-1]] @ params['embedding'].T
            right = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
            return -jnp.mean(right)

        return jax.grad(loss)(params)

    args = {'embedding': normal(16, 8)}, integers(16, 8, 8)
    return helper.sjit(step, in_shardings=(P(), P('fsdp', 'sp'))), args


@partitioner(('scatter-add',))
def counts_of_all_but_the_last(helper: MeshShardingHelper) -> Step:
    """The same of counts, which are integers: what is in the padding is counted."""

    def step(groups: Any) -> Any:
        return jnp.bincount(groups[:-1], length=8)

    return jitted(helper, step, P('fsdp')), (integers(8, 16),)


@partitioner(('scatter-max',))
def largest_of_each_group_but_the_first(helper: MeshShardingHelper) -> Step:
    """The same of maxima."""

    def step(x: Any, groups: Any) -> Any:
        return jax.ops.segment_max(x[1:], groups[1:], 4)

    return jitted(helper, step, P('tp'), P('tp')), (normal(16, 4) - 3, integers(4, 16))


def _conv(images: Any, kernel: Any) -> Any:
    numbers = ('NHWC', 'HWIO', 'NHWC')
    return lax.conv_general_dilated(images, kernel, (1, 1), 'SAME', dimension_numbers=numbers)


@partitioner(('kernel', 'conv_general_dilated'))
def gradient_of_a_convolution_split_by_height(helper: MeshShardingHelper) -> Step:
    """As many times too large as devices have the same part of the images; without any groups."""

    def step(params: Any, images: Any) -> Any:
        return jax.grad(lambda params: jnp.sum(jnp.sin(_conv(images, params['kernel']))))(params)

    args = {'kernel': normal(3, 3, 4, 8)}, normal(4, 8, 8, 4)
    return helper.sjit(step, in_shardings=(P(), P(None, 'tp'))), args


@partitioner(('conv_general_dilated',))
def convolution_split_by_height_and_channels(helper: MeshShardingHelper) -> Step:
    """The result itself: as many times too large as the kernel's channels have parts."""

    def step(kernel: Any, images: Any) -> Any:
        return _conv(images, kernel)

    args = normal(3, 3, 4, 8), normal(4, 8, 8, 4)
    return helper.sjit(step, in_shardings=(P(None, None, None, 'fsdp'), P(None, 'tp'))), args


@partitioner(('images', 'select_and_scatter_add'))
def gradient_of_a_max_pool_split_by_height(helper: MeshShardingHelper) -> Step:
    """Windows that overlap, over rows that other devices have."""

    def step(images: Any) -> Any:
        def loss(images: Any) -> Any:
            window = (1, 3, 3, 1)
            pooled = lax.reduce_window(images['images'], -jnp.inf, lax.max, window, (1, 1, 1, 1), 'SAME')
            return jnp.sum(jnp.sin(pooled))

        return jax.grad(loss)(images)

    return helper.sjit(step, in_shardings=(P('fsdp', 'tp'),)), ({'images': normal(4, 8, 8, 4)},)


# Users


def mapped(helper: MeshShardingHelper, fun: Any, given: tuple[P, ...], out: Any, **options: Any) -> Any:
    """`jax.shard_map` without the check of what is the same on all devices, as users switch it off."""
    return jax.shard_map(
        fun, mesh=helper.mesh, in_specs=given, out_specs=out, **{'check_vma': False, **options}
    )


def _rows(helper: MeshShardingHelper, fun: Any, *args: Any, out: Any = WHOLE) -> Step:
    """A function on the rows of each device: all arguments but the first have rows."""
    given = (P(), *[P('fsdp')] * (len(args) - 1))
    return helper.sjit(mapped(helper, fun, given, out), in_shardings=given), args


def _loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params['w']) ** 2)


PARAMS = {'w': normal(8, 4)}


@user(('psum', 'loss'))
def missing_psum(helper: MeshShardingHelper) -> Step:
    """Each device has its own loss, and says that all have the same."""

    def step(params: Any, x: Any) -> Any:
        return {'loss': _loss(params, x), 'rows': lax.psum(x.shape[0], 'fsdp')}

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('w', 'psum'))
def gradient_of_own_rows(helper: MeshShardingHelper) -> Step:
    """The loss is averaged over devices, and its gradient is not."""

    def step(params: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(_loss)(params, x)
        return {'loss': lax.pmean(loss, 'fsdp'), 'gradient': gradient}

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('loss', 'psum'))
def mean_over_own_rows_summed_up(helper: MeshShardingHelper) -> Step:
    """Means of parts are added up: as many times too large as there are parts."""

    def step(params: Any, x: Any) -> Any:
        return {'loss': lax.psum(_loss(params, x), 'fsdp')}

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('loss',))
def mean_of_means_of_unequal_counts(helper: MeshShardingHelper) -> Step:
    """Parts count alike, however many tokens they have."""

    def step(params: Any, x: Any, mask: Any) -> Any:
        each = jnp.mean(jnp.tanh(x @ params['w']) ** 2, axis=-1)
        return {'loss': lax.pmean(jnp.sum(each * mask) / jnp.maximum(mask.sum(), 1), 'fsdp')}

    mask = (np.arange(16) % 7 < np.arange(16) / 3).astype(np.float32)
    return _rows(helper, step, PARAMS, normal(16, 8), mask)


@user(('w',))
def gradient_through_a_psum(helper: MeshShardingHelper) -> Step:
    """Without the check, the transpose of a `psum` is one more `psum`."""

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda params: lax.pmean(_loss(params, x), 'fsdp'))(params)
        return lax.psum(gradient, 'fsdp')

    return _rows(helper, step, PARAMS, normal(16, 8))


@user((), source='https://github.com/jax-ml/jax/issues/36886')
def gradient_of_each_row_by_what_all_devices_have(helper: MeshShardingHelper) -> Step:
    """The gradient by a value that devices have in common is summed over them."""

    def step(params: Any, x: Any) -> Any:
        return jax.vmap(lambda row: jax.grad(lambda w: jnp.sum(jnp.sin(row @ w)))(params['w']))(x)

    given = P(), P('fsdp')
    fun = mapped(helper, step, given, P('fsdp'), check_vma=True)
    return helper.sjit(fun, in_shardings=given), (PARAMS, normal(16, 8))


@user(('norm',))
def norm_counts_what_devices_have_in_common(helper: MeshShardingHelper) -> Step:
    """The squares of a bias, which each device has whole, are counted once for each of them."""

    def step(params: Any) -> Any:
        squares = jax.tree.map(lambda x: jnp.sum(x * x), params)
        norm = jnp.sqrt(lax.psum(squares['w'] + squares['bias'], 'tp'))
        return {'norm': norm, **jax.tree.map(lambda x: x / norm, params)}

    given = ({'w': P(None, 'tp'), 'bias': P()},)
    fun = mapped(helper, step, given, {'norm': P(), **given[0]})
    return helper.sjit(fun, in_shardings=given), ({'w': normal(8, 4), 'bias': 3 * normal(16)},)


@user(('axis_index',))
def position_by_another_axis(helper: MeshShardingHelper) -> Step:
    """Rows are over one axis, and their numbers are taken of another one."""

    def step(scale: Any, x: Any) -> Any:
        first = lax.axis_index('tp') * x.shape[0]
        return x * scale * (first + jnp.arange(x.shape[0]))[:, None]

    return _rows(helper, step, np.float32(0.5), normal(16, 8), out=P('fsdp'))


@user(('w', 'axis_index'))
def first_device_alone_decays(helper: MeshShardingHelper) -> Step:
    """What only the first device does, which on one device is all there is."""

    def step(params: Any, x: Any) -> Any:
        gradient = lax.pmean(jax.grad(_loss)(params, x), 'fsdp')
        is_first = lax.axis_index('fsdp') == 0
        return jax.tree.map(lambda w, g: w - 0.1 * g - jnp.where(is_first, 0.1 * w, 0), params, gradient)

    return _rows(helper, step, PARAMS, normal(16, 8))


@user(('dot_general',), mesh=FSDP)
def causal_mask_of_own_tokens(helper: MeshShardingHelper) -> Step:
    """Queries are split by tokens, and each device takes its first one for the first of all."""

    def step(key: Any, query: Any) -> Any:
        scores = query @ key.T
        is_before = jnp.arange(query.shape[0])[:, None] >= jnp.arange(key.shape[0])
        return jax.nn.softmax(jnp.where(is_before, scores, -jnp.inf)) @ key

    return _rows(helper, step, normal(16, 8), normal(16, 8, seed=1), out=P('fsdp'))


@user(('loss',))
def softmax_over_own_vocabulary(helper: MeshShardingHelper) -> Step:
    """The logarithm of the sum of exponentials is that of a part of the vocabulary."""

    def step(table: Any, x: Any, labels: Any) -> Any:
        logits = x @ table.T
        first = lax.axis_index('tp') * table.shape[0]
        is_label = jnp.arange(table.shape[0]) + first == labels[:, None]
        target = lax.psum(jnp.sum(jnp.where(is_label, logits, 0), -1), 'tp')
        return {'loss': lax.pmean(jnp.mean(jax.nn.logsumexp(logits, -1) - target), ('fsdp', 'tp'))}

    given = P('tp'), P('fsdp'), P('fsdp')
    fun = mapped(helper, step, given, P())
    return helper.sjit(fun, in_shardings=given), (normal(16, 8), normal(8, 8), integers(16, 8))


@user(('all_gather',))
def gathered_in_another_order(helper: MeshShardingHelper) -> Step:
    """Rows over two axes are gathered with the axes the other way around."""

    def step(x: Any) -> Any:
        return lax.all_gather(x, ('tp', 'fsdp'), tiled=True)

    given = (P(('fsdp', 'tp')),)
    return helper.sjit(mapped(helper, step, given, P()), in_shardings=given), (normal(16, 4),)


@user(('mean',))
def batch_statistics_of_own_rows(helper: MeshShardingHelper) -> Step:
    """Batch normalization by the mean and variance of the rows of a device."""

    def step(scale: Any, x: Any) -> Any:
        return {'normed': scale * (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), 'mean': x.mean(0)}

    return _rows(helper, step, normal(8), normal(16, 8), out={'normed': P('fsdp'), 'mean': P()})


@user(('random',))
def dropout_keyed_by_device(helper: MeshShardingHelper) -> Step:
    """The mask of a row depends on the device that has it."""

    def step(key: Any, x: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index('fsdp'))
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    return _rows(helper, step, jax.random.key(0), normal(16, 8), out=P('fsdp'))


@user(('random',))
def dropout_alike_on_all_devices(helper: MeshShardingHelper) -> Step:
    """Devices draw the same mask for different rows."""

    def step(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    return _rows(helper, step, jax.random.key(0), normal(16, 8), out=P('fsdp'))


@user(('custom_vjp', 'w'))
def custom_gradient_forgets_an_axis(helper: MeshShardingHelper) -> Step:
    """A product by columns sends back the gradient of a device's own columns."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def backward(kept: Any, g: Any) -> Any:
        x, w = kept
        return g @ w.T, x.T @ g  # the first one lacks a psum over tp

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jnp.tanh(x @ params['first'])
            return jnp.sum(jnp.sin(product(hidden, params['w'])))

        return jax.tree.map(lambda g: lax.psum(g, 'fsdp'), jax.grad(loss)(params))

    specs = {'first': P(), 'w': P(None, 'tp')}
    fun = mapped(helper, step, (specs, P('fsdp')), specs)
    args = {'first': normal(8, 6), 'w': normal(6, 4)}, normal(16, 8)
    return helper.sjit(fun, in_shardings=(specs, P('fsdp'))), args


@user(('callback',))
def callback_on_own_rows(helper: MeshShardingHelper) -> Step:
    """A function of numpy that normalizes what it gets, and gets the rows of a device."""

    def standardized(x: Any) -> Any:
        x = np.asarray(x)
        return ((x - x.mean(0)) / (x.std(0) + 1e-3)).astype(np.float32)

    def step(scale: Any, x: Any) -> Any:
        return scale * jax.pure_callback(standardized, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return _rows(helper, step, np.float32(2), normal(16, 8), out=P('fsdp'))


@user(('custom_partitioning',))
def custom_partitioning_by_a_wrong_rule(helper: MeshShardingHelper) -> Step:
    """The rule says that columns are independent, and a softmax over them is not."""

    def columns(x: Any) -> Any:
        return jax.nn.softmax(x)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        return mesh, columns, args[0].sharding, (args[0].sharding,)

    softmax = custom_partitioning(columns)
    softmax.def_partition(partition=partition, sharding_rule='b c -> b c')

    def step(w: Any, x: Any) -> Any:
        return softmax(x @ w)

    return helper.sjit(step, in_shardings=(P(None, 'tp'), P('fsdp'))), (normal(8, 6), normal(16, 8))


@user(('normed',))
def sharded_op_by_a_wrong_rule(helper: MeshShardingHelper) -> Step:
    """The same of `scalax.custom_op`: the columns of a norm are said to be independent."""

    @sharded_op('b c -> b c')
    def normed(ctx: Any, x: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))

    def step(w: Any, x: Any) -> Any:
        return {'normed': normed(x @ w)}

    return helper.sjit(step, in_shardings=(P(None, 'tp'), P('fsdp'))), (normal(8, 6), normal(16, 8))


@user(('psum',))
def sharded_op_sums_twice(helper: MeshShardingHelper) -> Step:
    """Partial products are added up, and added up once more."""

    @sharded_op('b c, c d -> b d', reduction_factors=('c',), check_vma=False)
    def product(ctx: Any, x: Any, w: Any) -> Any:
        return ctx.psum(ctx.psum(x @ w, 'c'), 'c')

    return helper.sjit(product, in_shardings=(P(None, 'tp'), P('tp'))), (normal(16, 8), normal(8, 6))


@user(('deleted',), raises='deleted')
def donated_buffer_read_later(helper: MeshShardingHelper) -> Step:
    """A step that closes over a state that the function in it is given for good."""
    update = helper.sjit(lambda w: 0.5 * w, in_shardings=P('fsdp'), out_shardings=P('fsdp'), donate_argnums=0)
    state = helper.shard(normal(16, 4), P('fsdp'))

    def step(x: Any) -> Any:
        return x + update(state) - state

    return step, (normal(16, 4),)


# scalax's own pass, with a mistake in it


def seeded(
    expects: tuple[str, ...], *changes: tuple[Any, str, Any], kind: Kind = 'pass', **options: Any
) -> Callable[[Any], Any]:
    """Adds a fault of the pass: while the step is traced, these attributes of these modules are others."""

    @contextlib.contextmanager
    def put_in() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for where, name, value in changes:
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    return fault(kind, expects, seeded=put_in, **options)


def always(answer: Any) -> Callable[..., Any]:
    """A function that answers always the same."""
    return lambda *args, **kwargs: answer


def alone(value: Any, *args: Any, **kwargs: Any) -> Any:
    """The value of a device, of which a collective would make that of all."""
    return value


def twice(value: Any, axes: Any) -> Any:
    """What is added up over devices, and then once more."""
    return parallel_sum(parallel_sum(value, axes), axes)


parallel_sum = lax.psum


class Module:
    """A module with other functions."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _numbered(x: Any, out: Any) -> None:
    out[...] = x[...] * (1 + pallas.program_id(0)).astype(jnp.float32)


def _added_up(x: Any, doubled: Any, total: Any) -> None:
    doubled[...] = 2 * x[...]

    @pallas.when(pallas.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...].sum(0, keepdims=True)


def _of_rows(body: Any, with_total: bool, x: Any) -> Any:
    """A kernel of Pallas that walks over the rows of an array, two at a time; of all it may have a total."""
    rows = pallas.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    whole = pallas.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    like = [jax.ShapeDtypeStruct((count, x.shape[1]), x.dtype) for count in (len(x), 1)]
    count = 1 + with_total
    return pallas.pallas_call(
        body,
        like[:count],
        grid=(len(x) // 2,),
        in_specs=[rows],
        out_specs=[rows, whole][:count],
        interpret=True,
    )(x)


def _dealt(kernel: Callable[[Any], Any]) -> Sequence[tuple[Any, str, Any]]:
    """A kernel that is interpreted is dealt to devices, as those of hardware are, whatever it does."""

    def run_part(equation: Any, operands: Any, shards: Any) -> Any:
        return [*kernel(*operands)]

    changes = {'is_interpreted': always(False), '_steps_are_apart': always(True), 'run_part': run_part}
    return [(kernels, name, value) for name, value in changes.items()]


numbered = functools.partial(_of_rows, _numbered, False)
added_up = functools.partial(_of_rows, _added_up, True)


def _followed(helper: MeshShardingHelper, fun: Any, *args: Any, rule: Any = None) -> Step:
    """A function of weights that are sharded and of a batch, whose rows are followed."""
    rule = rule or FSDPShardingRule('fsdp', min_fsdp_size=1)
    return helper.sjit(fun, in_shardings=(rule, P('fsdp'))), args


@seeded(('pallas_call',), *_dealt(numbered), mesh=FSDP)
def kernel_that_asks_for_its_step(helper: MeshShardingHelper) -> Step:
    """Dealt to devices, it gets the number of a device's own step."""
    return _followed(helper, lambda w, x: numbered(x @ w)[0], normal(8, 8), normal(16, 8))


@seeded(('total', 'pallas_call'), *_dealt(added_up), (kernels, '_walks_apart', always(True)), mesh=FSDP)
def kernel_that_adds_up_over_its_steps(helper: MeshShardingHelper) -> Step:
    """A missing sum: each device adds up its own rows."""

    def step(w: Any, x: Any) -> Any:
        doubled, total = added_up(x @ w)
        return {'doubled': doubled, 'total': total}

    return _followed(helper, step, normal(8, 8), normal(16, 8))


def _by_experts(w: Any, x: Any, *, back: Any = None) -> Any:
    """Tokens that are sorted by expert, multiplied in groups, and put back."""
    expert = jnp.argmax(x @ w['router'], -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=4)
    hidden = jnp.tanh(lax.ragged_dot(x[order], w['up'], sizes))
    out = lax.ragged_dot(hidden, w['down'], sizes)
    return out[jnp.argsort(order)] if back is None else back(out, order)


EXPERTS = {'router': normal(8, 4), 'up': normal(4, 8, 12) / 3, 'down': normal(4, 12, 8) / 3}
COLUMNS = TreePathShardingRule(
    ('router', P()), ('up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp')), strict=True
)


@seeded(('ragged_dot_general',), (lax, 'psum', alone))
def experts_without_a_sum(helper: MeshShardingHelper) -> Step:
    """A missing sum: hidden columns are split, and their products are not added up."""

    def step(w: Any, x: Any) -> Any:
        sizes = jnp.asarray([10, 20, 0, 34])
        return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, w['up'], sizes)), w['down'], sizes)

    return _followed(helper, step, EXPERTS, normal(64, 8), rule=COLUMNS)


@seeded(('ragged_dot_general',), (lax, 'axis_index', always(np.int32(0))))
def experts_of_the_first_device(helper: MeshShardingHelper) -> Step:
    """Each device takes its rows for the first ones, and multiplies them with the first experts."""

    def step(w: Any, x: Any) -> Any:
        return lax.ragged_dot(x, w['up'], jnp.asarray([10, 20, 0, 34]))

    return _followed(helper, step, EXPERTS, normal(64, 8))


@seeded(('sort',), (orders, '_require', always(None)), mesh=FSDP)
def order_of_the_sort_is_seen(helper: MeshShardingHelper) -> Step:
    """Devices sort their own rows, and what comes out shows in which order all are."""

    def step(w: Any, x: Any) -> Any:
        def back(out: Any, order: Any) -> Any:
            return jnp.cumsum(out, axis=0)[jnp.argsort(order)]

        return _by_experts(w, x, back=back)

    return _followed(helper, step, EXPERTS, normal(64, 8))


def _turned(rule: dims.Rule) -> dims.Rule:
    """The rule with the dimensions of results the other way around, where their sizes do not show it."""

    def wrong(equation: Any) -> dims.Dims:
        right, shapes = rule(equation), [var.aval.shape for var in equation.outvars]
        pairs = zip(right.results, shapes, strict=True)
        results = [each[::-1] if len({*shape}) == 1 else each for each, shape in pairs]
        return dataclasses.replace(right, results=tuple(results))

    return wrong


def _swapped(rule: dims.Rule) -> dims.Rule:
    """The rule with the first two dimensions of its operand swapped."""

    def wrong(equation: Any) -> dims.Dims:
        def other(sources: Any) -> Any:
            return tuple([(operand, 1 - dim) for operand, dim in sources])

        right = rule(equation)
        results = tuple([tuple(map(other, result)) for result in right.results])
        return dims.Dims(results, tuple(map(other, right.summed)))

    return wrong


SQUARE = 64  # rows, and columns: else shapes show that a trail is wrong

WRONG_TRAILS: Mapping[str, tuple[Callable[[dims.Rule], dims.Rule], Callable[[Any], Any]]] = {
    'transpose': (_turned, lambda out: out.T),
    'broadcast_in_dim': (_turned, lambda out: lax.broadcast_in_dim(out.sum(1), out.shape, (1,))),
    'dot_general': (_turned, lambda out: (out @ (normal(SQUARE, SQUARE) / 8)).T),
    'reshape': (_turned, lambda out: lax.reshape(lax.expand_dims(out, [1]), (SQUARE, SQUARE)).T),
    'squeeze': (_turned, lambda out: lax.squeeze(lax.expand_dims(out, [1]) * 2, [1]).T),
    'top_k': (_turned, lambda out: lax.top_k(out, SQUARE)[0].T),
    'argmax': (_swapped, lambda out: jnp.argmax(out, 0)),
    'argmin': (_swapped, lambda out: jnp.argmin(out, 0)),
    'reduce_prod': (_swapped, lambda out: jnp.prod(1 + out / 4, 0)),
}
"""Primitive -> its rule made wrong, and what is computed of sorted rows, which has others where they were."""


def _wrong_trail(name: str) -> None:
    """Adds a fault: a wrong trail in what is sorted by expert.

    A trail says where constraints are put, which change no value. It also says what has rows between a sort
    and where these are put back, and there a wrong one does: devices sort their own rows, where the order of
    all is seen.
    """
    wrong, computed = WRONG_TRAILS[name]

    def make(helper: MeshShardingHelper) -> Step:
        def step(w: Any, x: Any) -> Any:
            expert = jnp.argmax(x[:, :4], -1) if name != 'argmax' else lax.top_k(x[:, :4], 1)[1][:, 0]
            order = jnp.argsort(expert)
            out = jnp.tanh(lax.ragged_dot(x[order], w['up'], jnp.bincount(expert, length=4)))
            return computed(out)[jnp.argsort(order)]

        return _followed(helper, step, {'up': normal(4, 8, SQUARE) / 3}, normal(SQUARE, 8))

    make.__name__ = f'wrong_trail_of_{name}'
    rules = {**dims.RULES, name: wrong(dims.RULES[name])}
    seeded(('sort',), (dims, 'RULES', rules), mesh=FSDP)(make)


for _name in WRONG_TRAILS:
    _wrong_trail(_name)


def _over_rows(helper: MeshShardingHelper, each: Any, first: Any) -> Step:
    """A loop over the rows of a batch."""

    def step(w: Any, x: Any) -> Any:
        last, rows = lax.scan(lambda state, row: each(w, state, row), first, x)
        return {'last': last, 'rows': rows}

    return _followed(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(('last', 'scan'), (loops_over_rows, 'added_by_round', always([])), mesh=FSDP)
def running_average_taken_for_a_sum(helper: MeshShardingHelper) -> Step:
    """Devices run over their own rows, and the order of all rows counts."""

    def each(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return 0.9 * state + out, out

    return _over_rows(helper, each, jnp.zeros(8))


@seeded(
    ('last', 'scan'),
    (loops_over_rows, 'jnp', Module(jnp, zeros=lambda shape, dtype: jnp.full(shape, 0.5, dtype))),
    mesh=FSDP,
)
def each_device_begins_its_sum_with_something(helper: MeshShardingHelper) -> Step:
    """A doubled sum: what the loop begins with is added up over devices."""

    def each(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return state + out, out

    return _over_rows(helper, each, jnp.full(8, 0.5))


@seeded(
    ('rows', 'scan'),
    (
        loops_over_rows,
        'jnp',
        Module(jnp, moveaxis=lambda x, a, b: x if x.shape[0] == 4 else jnp.moveaxis(x, a, b)),
    ),
    mesh={'fsdp': 8},
)
def rows_put_together_in_a_transposed_order(helper: MeshShardingHelper) -> Step:
    """A transposed dimension: the first row of each device comes first."""

    def each(w: Any, state: Any, row: Any) -> Any:
        out = jnp.tanh(row @ w)
        return state + out, out

    def step(w: Any, x: Any) -> Any:
        last, rows = lax.scan(lambda state, row: each(w, state, row), jnp.zeros(8), x)
        return {'last': last, 'rows': rows}

    return _followed(helper, step, normal(8, 8) / 3, normal(32, 8))


def _is_handed_on(var: Any, out: Any, makers: Any) -> bool:
    """As if keys were handed on from round to round."""
    return out is var or jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)


@seeded(('rows', 'random_bits'), (loops_over_rows, '_is_same', _is_handed_on), mesh=FSDP)
def random_key_used_again_in_each_round(helper: MeshShardingHelper) -> Step:
    """A loop that splits its key in each round draws with the first one in all."""

    def each(w: Any, key: Any, row: Any) -> Any:
        key, used = jax.random.split(key)
        return key, jnp.where(jax.random.bernoulli(used, 0.5, (8,)), row @ w, 0)

    return _over_rows(helper, each, jax.random.key(0))


@seeded(('rng_bit_generator',), (loops_over_rows, 'draws_alike', always(True)), mesh=FSDP)
def random_key_of_one_device_used_by_all(helper: MeshShardingHelper) -> Step:
    """Mapped over devices, keys of this kind draw with the first one alone."""

    def step(w: Any, x: Any) -> Any:
        key = jax.random.key(0, impl='rbg')

        def noisy(given: Any) -> Any:
            row, number = given
            return row @ w + jax.random.normal(jax.random.fold_in(key, number), (8,))

        return lax.map(noisy, (x, jnp.arange(len(x))))

    return _followed(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(('scan',), (rows_by_number, '_is_number', always(True)), mesh=FSDP)
def row_of_another_number(helper: MeshShardingHelper) -> Step:
    """A loop that takes the last row first gets the first one."""

    def step(w: Any, x: Any) -> Any:
        return lax.map(lambda i: jnp.tanh(x[len(x) - 1 - i] @ w), jnp.arange(len(x)))

    return _followed(helper, step, normal(8, 8) / 3, normal(64, 8))


@seeded(
    ('w', 'scan'),
    (accumulations, '_LINEAR', accumulations._LINEAR | {'tanh'}),
    mesh=FSDP,
)
def sum_taken_through_what_is_not_linear(helper: MeshShardingHelper) -> Step:
    """A rewritten loop: the tanh of a sum in place of the sum of tanhs."""

    def step(w: Any, x: Any) -> Any:
        def each(total: Any, rows: Any) -> Any:
            return total + jnp.tanh(rows.T @ (rows @ w)).reshape(2, 4, 8), None

        total, _ = lax.scan(each, jnp.zeros((2, 4, 8)), x.swapaxes(0, 1))
        return {'w': total}

    return _followed(helper, step, normal(8, 8) / 3, normal(16, 6, 8))


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', alone))
def mended_convolution_without_its_sum(helper: MeshShardingHelper) -> Step:
    """A missing sum: the gradient of a depthwise convolution is that of a device's own rows."""
    _, args = _conv_gradient(helper, 16)
    return helper.sjit(_depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('kernel', 'conv_general_dilated'), (lax, 'psum', twice))
def mended_convolution_summed_up_twice(helper: MeshShardingHelper) -> Step:
    """A doubled sum: the same gradient, added up over devices that have it already."""
    _, args = _conv_gradient(helper, 16)
    return helper.sjit(_depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


def _depthwise_gradient(params: Any, images: Any) -> Any:
    return jax.grad(lambda params: jnp.sum(jnp.sin(_grouped(images, params['kernel'], 16))))(params)


@seeded(('kernel', 'conv_general_dilated'), (dispatch, 'with_right_gradients', lambda jaxpr, *_, **__: jaxpr))
def convolution_that_is_not_mended(helper: MeshShardingHelper) -> Step:
    """The gradient of a depthwise convolution as XLA has it."""
    _, args = _conv_gradient(helper, 16)
    return helper.sjit(_depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@seeded(('dynamic_update_slice',), (run, 'within_bounds', lambda equation: equation), mesh=FSDP)
def row_out_of_bounds_that_is_not_mended(helper: MeshShardingHelper) -> Step:
    """A row written out of bounds, as XLA has it where devices have rows."""

    def step(w: Any, x: Any, number: Any) -> Any:
        return lax.dynamic_update_slice(x @ w, 3 * jnp.ones((1, 8)), (number, 0))

    args = normal(8, 8), normal(16, 8), np.int32(17)
    return helper.sjit(step, in_shardings=(P(), P('fsdp'), P())), args


def _with_optimizer(helper: MeshShardingHelper, orthogonal: Any) -> Step:
    """A step whose optimizer computes a function of matrices, which devices compute of whole ones."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params['q'])
            return jnp.mean(out**2)

        return jax.tree.map(lambda w, g: w - 0.1 * orthogonal(g), params, jax.grad(loss)(params))

    rule = TreePathShardingRule(('.*', P(None, 'fsdp', 'tp')))
    return _followed(helper, step, {'q': normal(16, 16, 16) / 4}, normal(64, 16), rule=rule)


def _orthogonal(x: Any) -> Any:
    x = x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ (x.swapaxes(1, 2) @ x)
    return x


def _next_ones(function: Any, stack: Any, free: Any) -> Any:
    return [jnp.roll(x, 1, 0) for x in matrices_of_stack(function, stack, free)]


matrices_of_stack = matrices._of_stack
SPREAD = (matrices, '_BEGIN', 0), (matrices, '_pays', always(True))  # however small they are


@seeded(('q', 'dot_general'), *SPREAD, (matrices, '_of_stack', _next_ones))
def matrices_given_back_to_others(helper: MeshShardingHelper) -> Step:
    """Devices compute whole matrices of an optimizer, and each matrix gets that of its neighbour."""
    return _with_optimizer(helper, _orthogonal)


@seeded(('q',), *SPREAD, (dims, 'RULES', {**dims.RULES, 'sub': _turned(dims.RULES['sub'])}))
def wrong_trail_of_sub(helper: MeshShardingHelper) -> Step:
    """A wrong trail in a stack of matrices: its last dimension is taken for the stack."""

    def cubed(x: Any) -> Any:
        squared = x.swapaxes(1, 2) @ x
        return x @ squared - x @ squared @ squared

    return _with_optimizer(helper, lambda x: cubed(30 * x))


# Steps that are right


def _batch(helper: MeshShardingHelper, fun: Any, *args: Any) -> Step:
    """Weights that are sharded over both axes, and a batch that is followed."""
    rule = TreePathShardingRule(('.*', P('fsdp', 'tp')))
    return helper.sjit(fun, in_shardings=(rule, *[P('fsdp')] * (len(args) - 1))), args


TOKENS = normal(64, 8)
MATRIX = {'w': normal(8, 8, seed=3)}


@sound()
def adam_of_gradients_that_are_zero_but_for_rounding(helper: MeshShardingHelper) -> Step:
    """A bias in front of a softmax changes nothing, but Adam makes whole steps of what rounding leaves."""

    def step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return -jnp.mean(jax.nn.log_softmax(x @ w['w'] + w['shift'].sum())[:, 0])

        w, mean, square = state['w'], state['mean'], state['square']
        gradient = jax.grad(loss)(w)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradient)
        w = jax.tree.map(lambda w, m, v: w - 0.1 * m / (jnp.sqrt(v) + 1e-12), w, mean, square)
        return {'w': w, 'mean': mean, 'square': square}

    w = {**MATRIX, 'shift': normal(8, 2)}
    zeros = jax.tree.map(np.zeros_like, w)
    return _batch(helper, step, {'w': w, 'mean': zeros, 'square': zeros}, TOKENS)


@sound()
def routing_by_top_k_in_bfloat16(helper: MeshShardingHelper) -> Step:
    """Logits that are equal in bfloat16: which expert comes first, rounding decides."""

    def step(w: Any, x: Any) -> Any:
        logits = (x @ w['w']).astype(jnp.bfloat16) / 64
        gates, experts = lax.top_k(jax.nn.softmax(logits), 2)
        return {'experts': experts, 'gates': gates, 'load': jnp.bincount(experts.reshape(-1), length=8)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def largest_of_nearly_equal_logits(helper: MeshShardingHelper) -> Step:
    """Columns of the weight come in pairs that differ by less than rounding does."""

    def step(w: Any, x: Any) -> Any:
        logits = x @ jnp.concatenate([w['w'], w['w'] * (1 + 1e-7)], 1)
        return {'chosen': jnp.argmax(logits, -1), 'order': jnp.argsort(logits, -1)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def softmax_of_rows_that_are_masked(helper: MeshShardingHelper) -> Step:
    """Exact zeros, and rows of which all is masked, which are NaN; on both sides."""

    def step(w: Any, x: Any) -> Any:
        scores = x @ w['w']
        allowed = jnp.arange(8) < (jnp.arange(len(x)) % 9)[:, None]
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        return {'weights': weights, 'out': weights @ w['w'].T, 'any': jnp.isnan(weights).any()}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def not_numbers_at_the_same_places(helper: MeshShardingHelper) -> Step:
    """Logarithms of negative numbers, infinities, and zeros with a sign."""

    def step(w: Any, x: Any) -> Any:
        return {'log': jnp.log(x[:, :4]), 'inverse': 1 / jnp.round(x @ w['w']), 'minus': -jnp.zeros_like(x)}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def counts_behind_sums(helper: MeshShardingHelper) -> Step:
    """Integers and booleans that follow sums: how many are right, whether a loss is below a bound."""

    def step(w: Any, x: Any, labels: Any) -> Any:
        logits = x @ w['w']
        loss = jnp.mean(logits**2)
        right = jnp.sum(jnp.argmax(logits, -1) == labels)
        millions = (loss * 1e6).astype(jnp.int32)
        return {'right': right, 'millions': millions, 'is_finite': jnp.isfinite(loss), 'rows': len(x)}

    return _batch(helper, step, MATRIX, TOKENS, integers(8, 64))


@sound()
def sums_in_bfloat16(helper: MeshShardingHelper) -> Step:
    """A mean and a gradient of bfloat16 over all rows: few digits are left."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w['w']) ** 2, dtype=jnp.bfloat16)

        value, gradient = jax.value_and_grad(loss)(w)
        return {'loss': value, 'gradient': gradient}

    return _batch(helper, step, {'w': MATRIX['w'].astype(jnp.bfloat16)}, TOKENS)


@sound()
def chaos_of_two_hundred_rounds(helper: MeshShardingHelper) -> Step:
    """A logistic map that begins with a mean: its last digit is all that is seen in the end."""

    def step(w: Any, x: Any) -> Any:
        first = jax.nn.sigmoid(jnp.sum(jnp.tanh(x @ w['w']), 0) / 8)
        last, _ = lax.scan(lambda y, _: (3.9 * y * (1 - y), None), first, None, length=200)
        return {'first': first, 'last': last}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def signs_of_singular_vectors(helper: MeshShardingHelper) -> Step:
    """Of a matrix with equal singular values, the vectors may be any ones of a space."""

    def step(w: Any, x: Any) -> Any:
        moments = x.T @ x / len(x) + jnp.eye(8) * 1e3
        left, values, right = jnp.linalg.svd(moments)
        q, r = jnp.linalg.qr(x.T @ x @ w['w'])
        return {'left': left, 'values': values, 'right': right, 'q': q, 'r': r}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def newton_schulz(helper: MeshShardingHelper) -> Step:
    """Muon's iteration makes small singular values large, and what rounding made of those that are zero."""

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x[:, :2] @ w[:2]) ** 2))(w['w'])
        y = gradient / (jnp.linalg.norm(gradient) + 1e-7)
        for _ in range(5):
            a = y @ y.T
            y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
        return {'w': w['w'] - 0.1 * y}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def variance_of_what_is_far_from_zero(helper: MeshShardingHelper) -> Step:
    """The mean of squares less the square of the mean, of numbers near a thousand: no digit is right."""

    def step(w: Any, x: Any) -> Any:
        y = x @ w['w'] + 1000
        return {'variance': jnp.mean(y * y, 0) - jnp.mean(y, 0) ** 2}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def branch_by_a_norm_at_its_bound(helper: MeshShardingHelper) -> Step:
    """Clipping at a bound that is the norm itself, and a loop that ends where nothing changes any more."""

    def step(w: Any, x: Any) -> Any:
        gradient = jnp.mean(x @ w['w'], 0)
        norm = jnp.linalg.norm(gradient)
        bound = jnp.sqrt(jnp.sum(jnp.sort(gradient) ** 2))
        clipped = lax.cond(norm > bound, lambda g: g * (bound / norm), lambda g: g, gradient)

        def better(state: Any) -> Any:
            root, rounds = state
            return 0.5 * (root + norm / root), rounds + 1

        def is_far(state: Any) -> Any:
            root, rounds = state
            return (jnp.abs(root * root - norm) > 3e-8 * norm) & (rounds < 30)

        root, rounds = lax.while_loop(is_far, better, (norm + 1, 0))
        return {'clipped': clipped, 'root': root, 'rounds': rounds}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def numbers_rounded_to_eight_bits(helper: MeshShardingHelper) -> Step:
    """A product rounded to integers: some are one more, or one less."""

    def step(w: Any, x: Any) -> Any:
        y = (x.T @ x) @ w['w'] @ (x.T @ x)
        scale = jnp.max(jnp.abs(y)) / 127
        return {'int8': jnp.round(y / scale).astype(jnp.int8), 'scale': scale}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def dropout_by_one_key(helper: MeshShardingHelper) -> Step:
    """Random numbers of a key of one device; the next key is exactly that of one device."""

    def step(w: Any, x: Any) -> Any:
        key, used = jax.random.split(jax.random.key(7))
        kept = jax.random.bernoulli(used, 0.5, x.shape)
        order = jax.random.permutation(used, len(x))
        return {'out': jnp.where(kept, 2 * x, 0) @ w['w'], 'kept': kept, 'order': order, 'key': key}

    return _batch(helper, step, MATRIX, TOKENS)


@sound()
def sums_over_devices_that_are_right(helper: MeshShardingHelper) -> Step:
    """`jax.shard_map` with all sums that it needs, and the check of them."""

    def step(params: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda params: lax.pmean(_loss(params, x), 'fsdp'))(params)
        return {'loss': loss, 'gradient': gradient}

    given = P(), P('fsdp')
    fun = mapped(helper, step, given, P(), check_vma=True)
    return helper.sjit(fun, in_shardings=given), (PARAMS, normal(16, 8))


@sound()
def convolution_that_is_mended(helper: MeshShardingHelper) -> Step:
    """The gradient of a depthwise convolution, as `sjit` mends it."""
    _, args = _conv_gradient(helper, 16)
    return helper.sjit(_depthwise_gradient, in_shardings=(P(), P('fsdp'))), args


@sound()
def state_that_is_donated(helper: MeshShardingHelper) -> Step:
    """A state that is given for good, and returned anew."""

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(lambda w: jnp.mean((x @ w['w']) ** 2))(w))

    rule = TreePathShardingRule(('.*', P('fsdp', 'tp')))
    shardings = {'in_shardings': (rule, P('fsdp')), 'out_shardings': rule}
    return helper.sjit(step, **shardings, donate_argnums=0), (MATRIX, TOKENS)


@sound()
def overflow_of_half_precision(helper: MeshShardingHelper) -> Step:
    """A sum in float16 near its largest number: infinite, or just not, by the order of summands."""

    def step(w: Any, x: Any) -> Any:
        total = jnp.sum(jnp.abs(x @ w['w']).astype(jnp.float16) * 56)
        return {'total': total, 'is_finite': jnp.isfinite(total)}

    return _batch(helper, step, MATRIX, TOKENS)


# Mistakes of the pass that change where values are, and no value: what it puts in are constraints


harmless = functools.partial(seeded, (), kind='sound')


def _model(helper: MeshShardingHelper) -> Step:
    """A loss with a look-up, attention, a loop over layers, experts, and its gradient; all sizes are 8."""

    def layer(x: Any, w: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum('bqd,bkd->bqk', x @ w['q'], x @ w['k']))
        x = x + scores @ (x @ w['v'])
        gates = jax.nn.softmax(x @ w['router'])
        hidden = jnp.tanh(jnp.einsum('btd,edh->betd', x, w['up']))
        return x + jnp.einsum('betd,bte->btd', hidden, gates), None

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            x, _ = lax.scan(layer, params['table'][tokens], params['layers'])
            logits = jax.nn.log_softmax(x @ params['table'].T)
            return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

        return jax.value_and_grad(loss)(params)

    shapes = {'q': (), 'k': (), 'v': (), 'router': (), 'up': (8,)}
    layers = {name: normal(2, *shape, 8, 8, seed=ord(name[0])) / 3 for name, shape in shapes.items()}
    params = {'table': normal(8, 8), 'layers': layers}
    return _followed(helper, step, params, integers(8, 8, 8))


@harmless((dims, 'RULES', {name: _turned(rule) for name, rule in dims.RULES.items()}), mesh=FSDP)
def all_trails_are_wrong(helper: MeshShardingHelper) -> Step:
    """Every primitive has the dimensions of its results the other way around."""
    return _model(helper)


def _reversed(trail: Any, *args: Any) -> P:
    return P(*reversed(spec_of(trail, *args)))


@harmless((follow, 'spec_of', _reversed), mesh=FSDP)
def constraints_of_transposed_dimensions(helper: MeshShardingHelper) -> Step:
    """Values are constrained in the last dimension in place of the first one."""
    return _model(helper)


@harmless((operands, 'move_to_experts', lambda equation, trails, *_: (0, trails[0][::-1])), mesh=FSDP)
def rows_moved_to_where_no_expert_is(helper: MeshShardingHelper) -> Step:
    """All rows are moved in front of products with experts, and to other places than these are."""
    return _model(helper)
