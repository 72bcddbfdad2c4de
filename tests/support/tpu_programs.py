"""Programs for absent TPUs, with every common kind of sharding, for tests of plans."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples import expert_parallel, plan_llama, ring_attention
from examples.llama.model import ModelConfig
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    TreePathShardingRule,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P

Step = tuple[Any, tuple[Any, ...]]
FSDP_RULE = FSDPShardingRule('fsdp', min_fsdp_size=1)
STACKED = TreePathShardingRule(('up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp')))


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: the function that makes it, its mesh and its topology."""

    make: Callable[[MeshShardingHelper], Step]
    topology: str
    mesh: dict[str, int]
    slices: int = 1

    def helper(self) -> MeshShardingHelper:
        dcn = [self.slices if i == 0 else 1 for i in range(len(self.mesh))] if self.slices > 1 else None
        return MeshShardingHelper.from_topology(
            *(self.topology, list(self.mesh.values()), list(self.mesh), True),
            num_slices=self.slices,
            dcn_axis_dims=dcn,
        )


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- Products -------------------------------------------------------------------------------------


def two_products(helper: MeshShardingHelper) -> Step:
    """Two partial sums that are added: one all-reduce serves both."""
    shardings = (P('fsdp', 'tp'), P('fsdp', 'tp'), P('tp'), P('tp'))
    fun = helper.sjit(lambda a, b, v, w: a @ v + b @ w, in_shardings=shardings, out_shardings=P('fsdp'))
    return fun, (array(8192, 8192),) * 4


def block(helper: MeshShardingHelper) -> Step:
    """A feed-forward block, column-parallel then row-parallel."""
    rule = TreePathShardingRule(('up', P(None, 'tp')), ('down', P('tp')))
    fun = helper.sjit(
        lambda p, x: jax.nn.relu(x @ p['up']) @ p['down'],
        in_shardings=(rule, P('fsdp')),
        out_shardings=P('fsdp'),
    )
    return fun, ({'up': array(4096, 16384), 'down': array(16384, 4096)}, array(8192, 4096))


def gathered(helper: MeshShardingHelper) -> Step:
    """Weights that are gathered before use, without a loop."""

    def forward(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for name in sorted(params):
            x = jax.nn.gelu(x @ with_sharding_constraint(params[name], P()))
        return x

    params = {f'w{i}': array(4096, 4096) for i in range(3)}
    fun = helper.sjit(forward, in_shardings=(FSDP_RULE, P('fsdp')), out_shardings=P('fsdp'))
    return fun, (params, array(helper.mesh.size * 512, 4096))


# --- Training of stacked layers ---------------------------------------------------------------------


def _train(
    helper: MeshShardingHelper,
    layer: Callable[..., Any],
    rule: Any,
    params: Any,
    x: Any,
    batch: P,
    *,
    checkpoint: bool = True,
    policy: Any = None,
) -> Step:
    """A gradient step with plain SGD over a scan of layers."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer, policy=policy) if checkpoint else layer
        return jnp.square(
            jax.lax.scan(lambda x, w: (body(x, w), None), x, params)[0].astype('float32')
        ).mean()

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    fun = helper.sjit(step, in_shardings=(rule, batch), out_shardings=(rule, P()), donate_argnums=0)
    return fun, (params, x)


def _stack(layers: int, width: int) -> dict[str, Any]:
    return {'up': array(layers, width, 4 * width), 'down': array(layers, 4 * width, width)}


def _rows(helper: MeshShardingHelper, axes: tuple[str, ...], width: int, rows_per_device: int = 1024) -> Any:
    return array(math.prod(helper.mesh.shape[axis] for axis in axes) * rows_per_device, width)


def _mlp(spec: P, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return with_sharding_constraint(x + jax.nn.relu(x @ w['up']) @ w['down'], spec)


def fsdp(helper: MeshShardingHelper, checkpoint: bool = True) -> Step:
    """Fully sharded data parallel training over all axes of the mesh, with constraints on activations."""
    axes = tuple(helper.axis_names)
    rule = FSDPShardingRule(axes, min_fsdp_size=1).stacked()
    layer = functools.partial(_mlp, P(axes))
    step = _train(
        *(helper, layer, rule, _stack(8, 2048), _rows(helper, axes, 2048), P(axes)), checkpoint=checkpoint
    )
    return step


def fsdp_saved(helper: MeshShardingHelper) -> Step:
    """The same without rematerialization of activations."""
    return fsdp(helper, checkpoint=False)


def fsdp_tp(helper: MeshShardingHelper) -> Step:
    """Weights sharded over two axes."""
    layer = functools.partial(_mlp, P('fsdp'))
    return _train(helper, layer, STACKED, _stack(8, 2048), _rows(helper, ('fsdp',), 2048), P('fsdp'))


def sequence_parallel(helper: MeshShardingHelper) -> Step:
    """Between matmuls, sequences are sharded over the axis of the weights."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        normed = x / (1e-3 + jnp.abs(x).max(-1, keepdims=True))
        normed = with_sharding_constraint(normed, P('fsdp', None, None))
        hidden = with_sharding_constraint(jax.nn.relu(normed @ w['up']), P('fsdp', None, 'tp'))
        return x + with_sharding_constraint(hidden @ w['down'], P('fsdp', 'tp', None))

    x = array(helper.mesh.shape['fsdp'] * 2, 2048, 2048)
    return _train(helper, layer, STACKED, _stack(6, 2048), x, P('fsdp', 'tp'))


def zero_1(helper: MeshShardingHelper) -> Step:
    """Replicated parameters, a sharded optimizer state."""
    params = {'a': array(2048, 8192), 'b': array(8192, 2048)}
    optimizer = optax.adam(1e-3)
    state = OptimizerStateShardingRule(P('fsdp'), params)

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square((jax.nn.relu(x @ params['a']) @ params['b']).astype('float32')).mean()

    def step(params: Any, opt_state: Any, x: jax.Array) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(jax.grad(loss)(params, x), opt_state)
        return optax.apply_updates(params, updates), opt_state

    fun = helper.sjit(
        step, in_shardings=(P(), state, P('fsdp')), out_shardings=(P(), state), donate_argnums=(0, 1)
    )
    return fun, (params, jax.eval_shape(optimizer.init, params), _rows(helper, ('fsdp',), 2048))


def offloaded(helper: MeshShardingHelper) -> Step:
    """Activations are kept in host memory until the backward pass."""
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=['hidden'],
        offload_src='device',
        offload_dst='pinned_host',
    )

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        x = checkpoint_name(x, 'hidden')
        return with_sharding_constraint(x + jax.nn.relu(x @ w['up']) @ w['down'], P('fsdp'))

    return _train(
        *(helper, layer, STACKED, _stack(8, 2048), _rows(helper, ('fsdp',), 2048, 4096), P('fsdp')),
        policy=policy,
    )


# --- Loops and branches -----------------------------------------------------------------------------


def nested_loops(helper: MeshShardingHelper) -> Step:
    """A scan inside a scan; the inner one gathers a weight in each iteration."""

    def forward(w: jax.Array, x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return with_sharding_constraint(jnp.tanh(x @ w), P('fsdp')), None

        return jax.lax.scan(lambda x, _: (jax.lax.scan(inner, x, w)[0], None), x, length=3)[0]

    fun = helper.sjit(forward, in_shardings=(P(None, 'fsdp'), P('fsdp')), out_shardings=P('fsdp'))
    return fun, (array(5, 2048, 2048), _rows(helper, ('fsdp',), 2048))


def branches(helper: MeshShardingHelper) -> Step:
    """Each of six layers runs one of two branches; both gather a weight."""

    def forward(w: dict[str, jax.Array], x: jax.Array, flags: jax.Array) -> jax.Array:
        def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
            w, flag = both
            y = jax.lax.cond(flag, lambda: jnp.tanh(x @ w['a']), lambda: jax.nn.relu(x @ w['b']))
            return with_sharding_constraint(y, P('fsdp')), None

        return jax.lax.scan(layer, x, (w, flags))[0]

    fun = helper.sjit(forward, in_shardings=(P(None, 'fsdp'), P('fsdp'), P()), out_shardings=P('fsdp'))
    weights = {'a': array(6, 2048, 2048), 'b': array(6, 2048, 2048)}
    return fun, (weights, _rows(helper, ('fsdp',), 2048), array(6, dtype=jnp.bool_))


def switch(helper: MeshShardingHelper) -> Step:
    """One of four matmuls of different sizes, selected by an argument."""

    def forward(i: jax.Array, w: list[jax.Array], x: jax.Array) -> jax.Array:
        ways = [lambda w=w: jnp.tanh(x @ w).sum() for w in w]
        return jax.lax.switch(i, ways)

    fun = helper.sjit(forward, in_shardings=(P(), P('fsdp', 'tp'), P('fsdp')), out_shardings=P())
    weights = [array(2048, 1024 * 2**i) for i in range(4)]
    return fun, (array(dtype=jnp.int32), weights, _rows(helper, ('fsdp',), 2048))


def up_to(helper: MeshShardingHelper) -> Step:
    """``while i <= 7: i += 2``: four iterations."""

    def forward(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + 2, with_sharding_constraint(jnp.tanh(state[1] @ w), P('fsdp'))

        return jax.lax.while_loop(lambda state: state[0] <= 7, body, (jnp.int32(1), x))[1]

    fun = helper.sjit(forward, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp'))
    return fun, (array(4096, 4096), _rows(helper, ('fsdp',), 4096))


def accumulated(helper: MeshShardingHelper) -> Step:
    """The gradient of a batch in four microbatches."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
        def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            return jnp.square((jax.nn.relu(x @ params['up']) @ params['down']).astype('float32')).mean()

        def part(total: Any, x: jax.Array) -> tuple[Any, None]:
            grads = jax.grad(loss)(params, with_sharding_constraint(x, P('fsdp')))
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = jax.lax.scan(part, zeros, x.reshape(4, -1, x.shape[-1]))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {'up': array(2048, 8192), 'down': array(8192, 2048)}
    fun = helper.sjit(step, in_shardings=(FSDP_RULE, P('fsdp')), out_shardings=FSDP_RULE, donate_argnums=0)
    return fun, (params, _rows(helper, ('fsdp',), 2048, 4096))


# --- Written by hand --------------------------------------------------------------------------------


def rings(helper: MeshShardingHelper) -> Step:
    """Ring attention: keys and values circulate, in both passes."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        attend = ring_attention.sharded_attention(helper)
        return jax.grad(lambda q, k, v: jnp.square(attend(q, k, v)).sum(), (0, 1, 2))(q, k, v)

    fun = helper.sjit(step, in_shardings=(P(None, 'sp'),) * 3, out_shardings=P(None, 'sp'))
    return fun, (array(1, 8192, 8, 128, dtype=jnp.float32),) * 3


def experts(helper: MeshShardingHelper) -> Step:
    """A layer of experts with its gradient: tokens move to their experts and back."""
    count = helper.mesh.shape['expert']
    params = jax.eval_shape(
        functools.partial(expert_parallel.init_params, experts=2 * count, width=512, hidden=2048),
        jax.random.key(0),
    )
    layer = expert_parallel.sharded_expert_layer(helper)
    fun = helper.sjit(
        jax.grad(lambda params, tokens: jnp.square(layer(params, tokens)).mean()),
        in_shardings=(expert_parallel.PARAMS, expert_parallel.TOKENS),
        out_shardings=expert_parallel.PARAMS,
    )
    return fun, (params, array(helper.mesh.size * 256, 512, dtype=jnp.float32))


def by_hand(helper: MeshShardingHelper) -> Step:
    """All collectives available in shard_map."""
    a, b, c = helper.axis_names

    def each(x: jax.Array) -> jax.Array:
        x = jax.lax.all_gather(x, b, tiled=True)
        x = jax.lax.ppermute(x, a, [(0, 1), (1, 0)])
        x = jax.lax.psum_scatter(x, c, tiled=True)
        x = jax.lax.all_to_all(x, (b, c), 1, 0, tiled=True)
        return jax.lax.psum(x, (a, c))

    fun = jax.jit(helper.shard_map(each, P((a, b, c)), P(b), check_vma=False))
    return fun, (array(2048, 2048),)


def resharded(helper: MeshShardingHelper) -> Step:
    """Sharding by rows becomes sharding by columns."""
    fun = helper.sjit(lambda x: x * 2, in_shardings=P('fsdp'), out_shardings=P(None, 'fsdp'))
    return fun, (array(4096, 4096),)


def rolled(helper: MeshShardingHelper) -> Step:
    """Each device sends three rows to the next; the last device's shard is smaller, so it is padded."""
    fun = helper.sjit(lambda x: jnp.roll(x, 3, 0) + 1, in_shardings=P('fsdp'), out_shardings=P('fsdp'))
    return fun, (array(4096, 4096),)


def stencil(helper: MeshShardingHelper) -> Step:
    """A convolution over a sharded dimension: each device needs the edges of its neighbours."""

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))

    fun = helper.sjit(forward, in_shardings=(P(None, 'fsdp'), P()), out_shardings=P(None, 'fsdp'))
    return fun, (array(8, 256, 256, 128), array(3, 3, 128, 128))


def pallas(helper: MeshShardingHelper, metadata: dict[str, str] | None = None) -> Step:
    """A user's kernel between two matmuls, with attributes."""
    from jax.experimental import pallas as pl

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def scaled(x: jax.Array) -> jax.Array:
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // 256,),
            in_specs=[pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0)),
            metadata=metadata,
        )
        return call(x)

    def forward(w: jax.Array, x: jax.Array) -> jax.Array:
        y = helper.shard_map(scaled, P('fsdp', 'tp'), P('fsdp', 'tp'), check_vma=False)(x @ w)
        return y @ w.T

    fun = helper.sjit(forward, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp'))
    return fun, (array(2048, 2048), _rows(helper, ('fsdp',), 2048))


def pallas_with_metadata(helper: MeshShardingHelper) -> Step:
    """The same with metadata, which XLA prints over several lines."""
    return pallas(helper, {'kernel': 'scaled', 'note': 'two\nlines'})


# --- Decoders -------------------------------------------------------------------------------------

SMALL = plan_llama.Llama3(width=1024, layers=4, heads=8, kv_heads=4, vocabulary=32_000, units=4096)


def decoder(helper: MeshShardingHelper, model: ModelConfig = SMALL) -> Step:
    """The training step of examples/llama, with all activations constrained by name."""
    return plan_llama.make_step(helper, model, plan_llama.catalogue.TENSOR_PARALLEL)


def llama_8b(helper: MeshShardingHelper) -> Step:
    return decoder(helper, plan_llama.LLAMA_8B)


def llama_70b(helper: MeshShardingHelper) -> Step:
    return decoder(helper, plan_llama.LLAMA_70B)


# --- In the memory of the host ------------------------------------------------------------------------


def parked(helper: MeshShardingHelper) -> Step:
    """The optimizer state stays in host memory between steps."""
    spec = P('fsdp', 'tp')
    host = jax.sharding.NamedSharding(helper.mesh, spec, memory_kind='pinned_host')

    def step(w: jax.Array, momentum: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        grad = jax.grad(lambda w: jnp.square((x @ w).astype('float32')).mean())(w)
        momentum = 0.9 * jax.device_put(momentum, jax.memory.Space.Device) + grad
        return w - 0.1 * momentum, jax.device_put(momentum, jax.memory.Space.Host)

    fun = helper.sjit(
        step, in_shardings=(spec, host, P('fsdp')), out_shardings=(spec, host), donate_argnums=(0, 1)
    )
    return fun, (array(4096, 8192), array(4096, 8192), _rows(helper, ('fsdp',), 4096, 2048))


# --- For GPUs -----------------------------------------------------------------------------------------


def product(helper: MeshShardingHelper) -> Step:
    """Each group of fsdp has two GPUs on each of two hosts, and gathers half of the weights: 16 MiB."""
    step = helper.sjit(
        lambda w, x: x @ w, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp', 'tp')
    )
    return step, (array(4096, 4096),) * 2


def convolutions(helper: MeshShardingHelper) -> Step:
    """A step of a small convolutional network with strides, and a sharded batch."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.lax.conv_general_dilated(x, w, (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
            x = jax.nn.relu(x)
        return jnp.square(x.astype('float32')).mean()

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    fun = helper.sjit(step, in_shardings=(P(), P('fsdp')), out_shardings=P(), donate_argnums=0)
    params = [array(7, 7, 3, 64), array(3, 3, 64, 128), array(3, 3, 128, 256)]
    return fun, (params, array(helper.mesh.shape['fsdp'] * 16, 224, 224, 3))


def vision(helper: MeshShardingHelper) -> Step:
    """A step of a vision transformer: patches by a convolution, then attention and feed-forward blocks."""

    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = jnp.moveaxis((x @ w['qkv']).reshape(*x.shape[:2], 3, 8, 64), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w['out']
        return x + jax.nn.gelu(x @ w['up']) @ w['down'], None

    def loss(params: dict[str, Any], images: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            images, params['patch'], (16, 16), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )
        x, _ = jax.lax.scan(jax.checkpoint(block), x.reshape(len(images), -1, 512), params['blocks'])
        return jnp.square((x.mean(1) @ params['head']).astype('float32')).mean()

    def step(params: dict[str, Any], images: jax.Array) -> dict[str, Any]:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, images))

    weights = FSDPShardingRule('fsdp', min_fsdp_size=1)
    rule = {'patch': P(), 'head': weights, 'blocks': weights.stacked()}
    fun = helper.sjit(step, in_shardings=(rule, P('fsdp')), out_shardings=rule, donate_argnums=0)
    blocks = {'qkv': array(6, 512, 1536), 'out': array(6, 512, 512), 'up': array(6, 512, 2048)}
    params = {
        'patch': array(16, 16, 3, 512),
        'head': array(512, 1024),
        'blocks': {**blocks, 'down': array(6, 2048, 512)},
    }
    return fun, (params, array(helper.mesh.shape['fsdp'] * 16, 224, 224, 3))


def attention(helper: MeshShardingHelper) -> Step:
    """Attention with fewer key and value heads than query heads: by cuDNN on GPUs, otherwise in plain JAX.

    Both recompute the scores in the backward pass.
    """
    on_gpus = helper.mesh.devices.flat[0].platform == 'gpu'

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if on_gpus:
            return jax.nn.dot_product_attention(query, key, value, implementation='cudnn')
        return jax.checkpoint(jax.nn.dot_product_attention)(query, key, value)

    spec = P('fsdp', None, 'tp')
    on_all = helper.shard_map(kernel, (spec,) * 3, spec, check_vma=False)

    def step(*given: jax.Array) -> Any:
        def loss(*given: jax.Array) -> jax.Array:
            return jnp.square(on_all(*given).astype('float32')).mean()

        return jax.grad(loss, argnums=(0, 1, 2))(*given)

    fun = helper.sjit(step, in_shardings=(spec,) * 3, out_shardings=(spec,) * 3)
    return fun, (array(8, 1024, 16, 128), array(8, 2048, 4, 128), array(8, 2048, 4, 128))


TWO = {'fsdp': 4, 'tp': 2}
FOUR = {'fsdp': 4, 'tp': 4}
CUBE = {'fsdp': 16, 'tp': 4}
PROGRAMS: dict[str, Program] = {
    **{
        f'{make.__name__} v5e': Program(make, 'v5e:2x4', TWO)
        for make in (block, gathered, fsdp, fsdp_saved, fsdp_tp, sequence_parallel, zero_1, offloaded)
    },
    **{
        f'{make.__name__} v5e': Program(make, 'v5e:2x4', TWO)
        for make in (nested_loops, branches, switch, up_to, accumulated, resharded, rolled, stencil, pallas)
    },
    'two_products v5e': Program(two_products, 'v5e:2x4', {'fsdp': 2, 'tp': 4}),
    'pallas_with_metadata v5e': Program(pallas_with_metadata, 'v5e:2x4', TWO),
    'parked v5e': Program(parked, 'v5e:2x4', TWO),
    'rings v5e': Program(rings, 'v5e:2x4', {'sp': 8}),
    'rings v6e': Program(rings, 'v6e:2x4', {'sp': 8}),
    'experts v5e': Program(experts, 'v5e:4x4', {'dp': 2, 'expert': 8}),
    'experts v5p': Program(experts, 'v5p:2x2x2', {'dp': 2, 'expert': 4}),
    'by_hand v5p': Program(by_hand, 'v5p:2x2x2', {'a': 2, 'b': 2, 'c': 2}),
    'by_hand v5e': Program(by_hand, 'v5e:2x4', {'a': 2, 'b': 2, 'c': 2}),
    'decoder v5e': Program(decoder, 'v5e:2x4', TWO),
    'decoder v6e': Program(decoder, 'v6e:4x4', FOUR),
    'decoder v5p': Program(decoder, 'v5p:2x2x2', {'fsdp': 4, 'tp': 2}),
    'fsdp v6e': Program(fsdp, 'v6e:4x4', {'fsdp': 16}),
    'fsdp v5p': Program(fsdp, 'v5p:4x4x4', {'fsdp': 64}),
    'fsdp_tp v6e': Program(fsdp_tp, 'v6e:4x4', FOUR),
    'fsdp_tp v5p': Program(fsdp_tp, 'v5p:4x4x4', CUBE),
    'sequence_parallel v6e': Program(sequence_parallel, 'v6e:4x4', FOUR),
    'sequence_parallel v5p': Program(sequence_parallel, 'v5p:4x4x4', CUBE),
    'nested_loops v5p': Program(nested_loops, 'v5p:2x2x2', {'fsdp': 8}),
    'offloaded v6e': Program(offloaded, 'v6e:4x4', FOUR),
    'offloaded v5p': Program(offloaded, 'v5p:2x2x2', TWO),
    'fsdp two slices': Program(fsdp, 'v5e:2x4', {'data': 2, 'fsdp': 8}, slices=2),
    'decoder two slices': Program(decoder, 'v5e:2x4', {'data': 2, 'fsdp': 4, 'tp': 2}, slices=2),
    'decoder v5p two slices': Program(decoder, 'v5p:2x2x2', {'data': 2, 'fsdp': 4, 'tp': 2}, slices=2),
    'two_products v5p': Program(two_products, 'v5p:2x2x2', {'fsdp': 2, 'tp': 4}),
    'pallas_with_metadata v6e': Program(pallas_with_metadata, 'v6e:2x4', TWO),
    'llama 8b v5p': Program(llama_8b, 'v5p:4x4x4', CUBE),
    'llama 70b pod': Program(llama_70b, 'v5p:16x16x16', {'data': 2, 'fsdp': 256, 'tp': 8}),
}
