# %% [markdown]
# # Sharding in JAX, from specs to tensor parallelism
#
# How arrays are sharded over devices, how JAX tracks it, and who decides: you, the types, or the compiler. In
# four parts:
#
# 1. **Placing arrays**: specs, shardings, Explicit axes, pictures.
# 2. **Programs**: propagation of shardings, `grad`, `vmap` and `scan`, constraints.
# 3. **Per-device code**: `shard_map` and its collectives.
# 4. **Mixing**: axes of several types, `auto_axes` and `explicit_axes`, and two common training layouts with
#    their collectives counted.
#
# Everything runs on eight simulated devices, and unchanged on eight real ones. `make tutorial` generates this
# page from `docs/tutorial.py`.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from scalax.errors import ScalaxError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    NamedSharding,
    TreePathShardingRule,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_collectives

jax.config.update('jax_num_cpu_devices', 8)  # before JAX looks for its devices

# %% [markdown]
# ## Part 1: Placing arrays
#
# ### A mesh
#
# A mesh names the axes of a grid of devices. Here `dp` is for data parallelism and `mp` for model
# parallelism; `-1` is inferred from the eight devices. Each axis has a *type*:
#
# - **Explicit**: the sharding along the axis is part of an array's JAX type, and JAX computes it during
#   tracing.
# - **Auto**: it is not; the compiler decides, and you may constrain it.
#
# (`jax.make_mesh` makes Explicit axes, `jax.sharding.Mesh` Auto ones. A helper has Auto axes by default.)

# %%
helper = MeshShardingHelper([-1, 2], ['dp', 'mp'], axis_types=AxisType.Explicit)
auto = MeshShardingHelper([-1, 2], ['dp', 'mp'])
print(helper)
print(auto)

# %% [markdown]
# ### PartitionSpec: sharding dimensions
#
# A spec has one entry for each dimension of an array:
#
# | entry | the dimension is |
# |---|---|
# | `None` | not sharded: every device has all of it |
# | `'dp'` | sharded over mesh axis `dp` |
# | `('dp', 'mp')` | sharded over both, with `dp` as the outer one |
#
# A spec may be shorter than the array has dimensions; the rest is not sharded. A mesh axis may appear once,
# and a dimension must be divisible by its axes. A spec knows neither devices nor shapes, so mistakes show
# only when it is applied to an array:

# %%
x = np.arange(32, dtype=np.float32).reshape(8, 4)
for spec in (P('dp', 'dp'), P(None, 'dp', 'mp'), P('pd'), P(None, ('dp', 'mp'))):
    try:
        helper.match_sharding_rule(spec, x)
    except ScalaxError as error:
        print(str(error).splitlines()[2].strip())

# %% [markdown]
# ### NamedSharding: a spec on a mesh
#
# A `NamedSharding` is a spec and a mesh, and so determines the block of each device.
# `helper.match_sharding_rule` makes NamedShardings from specs, and from scalax's rules for entire models.
# Arrays may have any number of dimensions: the kernels of a convolution have outputs, inputs, height, width.
#
# `P('dp')` and `P('dp', None)` mean the same, but are not equal. Compare shardings with `is_equivalent_to`.

# %%
sharding = helper.match_sharding_rule(P('dp', 'mp'), x)
print(sharding == NamedSharding(helper.mesh, P('dp', 'mp')))
print('each device has', sharding.shard_shape(x.shape), 'of', x.shape)
kernels = helper.match_sharding_rule(P('mp', 'dp', None, None), np.zeros((64, 32, 3, 3)))
print('and', kernels.shard_shape((64, 32, 3, 3)), 'of', (64, 32, 3, 3))
print(P('dp') == P('dp', None))
print(NamedSharding(helper.mesh, P('dp')).is_equivalent_to(NamedSharding(helper.mesh, P('dp', None)), ndim=2))

# %% [markdown]
# ### Sharded arrays, and their types
#
# `helper.shard(tree, rule)` places a tree of arrays in one transfer (`jax.device_put(x, sharding)` does it
# for one sharding). Every array then has a `.sharding`, with its `.mesh` and `.spec`, `.devices()`, and
# `.addressable_shards`, the blocks of this process. `.is_fully_replicated` says whether each device has the
# entire array. On Explicit axes its type has the sharding too.

# %%
explicit_x = helper.shard(x, P('dp', 'mp'))
auto_x = auto.shard(x, P('dp', 'mp'))
for each in (explicit_x, auto_x):
    print(each.sharding.spec, 'on', len(each.devices()), 'devices; type:', jax.typeof(each))
print('replicated:', explicit_x.is_fully_replicated, helper.shard(x, P()).is_fully_replicated)
first = explicit_x.addressable_shards[0]
print(f'device {first.device.id} has rows 0-1, columns 0-1:', first.data.tolist())

# %% [markdown]
# ### reshard
#
# `jax.reshard` gives an array another sharding along Explicit axes, eagerly or inside a program. If a mesh is
# set (inside `sjit`, or under `jax.set_mesh`), a spec is enough. Otherwise it takes a NamedSharding. Both are
# hashable, so a program can take them as static arguments; it is traced once for each.

# %%
turned = helper.sjit(lambda x: jax.reshard(x, P('mp', 'dp')))(explicit_x)
print(jax.typeof(turned))
with jax.set_mesh(helper.mesh):
    print(jax.typeof(jax.reshard(explicit_x, P(None, 'mp'))))
print(jax.typeof(jax.reshard(explicit_x, NamedSharding(helper.mesh, P('mp')))))
moved = helper.sjit(jax.reshard, static_argnums=1)
for target in (NamedSharding(helper.mesh, P('mp')), P(None, 'dp')):
    print(jax.typeof(moved(explicit_x, target)))

# %% [markdown]
# ### Pictures
#
# `helper.visualize` draws which device holds which block, of one array or of a tree. With a rule it draws the
# resolved shardings, without placing anything. (`jax.debug.visualize_array_sharding` draws one array of at
# most two dimensions.)

# %%
helper.visualize({'both axes': explicit_x, 'turned': turned})

# %%
helper.visualize(
    {'rows': x, 'replicated along dp': x}, {'rows': P(('dp', 'mp')), 'replicated along dp': P('mp')}
)

# %% [markdown]
# ## Part 2: Programs
#
# ### Propagation, in the types
#
# On Explicit axes, each operation computes the sharding of its result from the types of its arguments during
# tracing. So you can print types in a program, and mistakes are errors with a line number. New arrays are
# replicated, unless `out_sharding` is given or they are made like another array.


# %%
@helper.sjit
def program(x, row):
    print('x             ', jax.typeof(x))
    print('row           ', jax.typeof(row))
    print('sin(x)        ', jax.typeof(jnp.sin(x)))
    print('x + row       ', jax.typeof(x + row))
    print('x.T           ', jax.typeof(x.T))
    print('x.sum(axis=0) ', jax.typeof(x.sum(axis=0)))
    print('zeros_like(x) ', jax.typeof(jnp.zeros_like(x)))
    print('zeros         ', jax.typeof(jnp.zeros((8, 4))))
    print('zeros, sharded', jax.typeof(jnp.zeros((8, 4), out_sharding=P('dp'))))
    return x + row


row = helper.shard(np.ones(4, np.float32), P())
result = program(explicit_x, row)

# %% [markdown]
# ### out_sharding: resolving ambiguity
#
# Some results have no unique sharding. A product that contracts a sharded dimension leaves a part of the sum
# on each device; the result may be replicated or scattered. In `x + x.T` each dimension is sharded over `dp`
# in one array and over `mp` in the other. After a `reshape`, a device's data may not be a block at all. JAX
# does not guess: it raises an error. Products, `einsum`, `reshape`, gathers and others take `out_sharding`.

# %%
w = helper.shard(np.ones((4, 8), np.float32), P('mp'))
square = helper.shard(np.ones((8, 8), np.float32), P('dp', 'mp'))
for name, ambiguous, args in (
    ('x @ w', lambda x, w: x @ w, (explicit_x, w)),
    ('x + x.T', lambda x: x + x.T, (square,)),
    ('x.reshape(4, 8)', lambda x: x.reshape(4, 8), (explicit_x,)),
):
    try:
        helper.sjit(ambiguous)(*args)
    except Exception as error:
        print(f'{name}: {type(error).__name__}')


@helper.sjit
def products(x, w):
    replicated = jnp.einsum('ij,jk->ik', x, w, out_sharding=P('dp'))
    scattered = jnp.einsum('ij,jk->ik', x, w, out_sharding=P('dp', 'mp'))
    reshaped = jnp.reshape(x, (4, 8), out_sharding=P('dp', 'mp'))
    print(jax.typeof(replicated), jax.typeof(scattered), jax.typeof(reshaped))
    return replicated, scattered


for y in products(explicit_x, w):
    np.testing.assert_array_equal(y, x @ np.ones((4, 8)))


# %% [markdown]
# ### grad, vmap, scan, while_loop and cond
#
# A gradient has the type of its parameter. Under `vmap` the mapped dimension keeps its axis, though the
# function does not see it. The carry of `scan` and `while_loop` must keep its type, and the branches of
# `cond` must agree in theirs, sharding included: if it changes, reshard it.

# %%
print('gradient:', jax.typeof(helper.sjit(jax.grad(lambda x: (x**2).sum()))(explicit_x)))


@helper.sjit
@jax.vmap
def one_row(row):
    print('one row: ', jax.typeof(row))
    return row / row.sum()


print('all rows:', jax.typeof(one_row(explicit_x)))


def steps(keep, x):
    def step(carry, _):
        summed = carry + carry.sum(axis=0)
        return keep(jax.reshard(summed, P('dp'))), None

    return jax.lax.scan(step, x, None, length=3)[0]


try:
    helper.sjit(functools.partial(steps, lambda carry: carry))(explicit_x)
except TypeError as error:
    print('the carry changes its type:', 'float32[8@dp,4]' in str(error))
kept = helper.sjit(functools.partial(steps, lambda carry: jax.reshard(carry, P('dp', 'mp'))))
print('the carry is brought back: ', jax.typeof(kept(explicit_x)))


def doubled_or_whole(keep, x):
    return jax.lax.cond(x.max() < 1000, lambda x: 2 * x, lambda x: keep(jax.reshard(x, P('dp'))), x)


def until(keep, x):
    return jax.lax.while_loop(lambda x: x.sum() < 9999, functools.partial(doubled_or_whole, keep), x)


try:
    helper.sjit(functools.partial(until, lambda x: x))(explicit_x)
except TypeError as error:
    print('the branches differ:       ', 'float32[8@dp,4@mp]' in str(error))
kept = helper.sjit(functools.partial(until, lambda x: jax.reshard(x, P('dp', 'mp'))))
print('the branches agree:        ', jax.typeof(kept(explicit_x)))

# %% [markdown]
# ### Auto axes: the compiler's choice, and constraints
#
# On Auto axes types contain no shardings, and the compiler propagates shardings through the entire program,
# forwards and backwards. A *constraint* guides it. `jax.lax.with_sharding_constraint` is for Auto axes: on
# Explicit axes it only asserts the type, and `jax.reshard` moves. scalax's `with_sharding_constraint` does
# what each axis needs, so a model with constraints runs on any mesh.


# %%
def model(x):
    return with_sharding_constraint(jnp.sin(x), P('mp', 'dp'))


for each, placed in ((auto, auto_x), (helper, explicit_x)):
    y = each.sjit(model)(placed)
    print(each, y.sharding.spec, jax.typeof(y))

try:
    with jax.set_mesh(helper.mesh):
        jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P('mp', 'dp')))(explicit_x)
except AssertionError as error:
    print('AssertionError:', str(error).split('.')[0])

# %% [markdown]
# ### The cost of a layout
#
# If data has another sharding than an operation needs, the compiler inserts collectives: the cost of a
# layout. `helper.plan` compiles a program without running it and lists them; tests assert them with
# `scalax.testing.assert_collectives`.


# %%
def collectives(plan):
    for row in plan.collectives:
        print(f'  {row.count} x {row.kind} along {", ".join(row.axes)}: {row.bytes:,} bytes')
    if not plan.collectives:
        print('  none')


@auto.sjit
def product(x, w):
    return x @ w


a = np.ones((64, 64), np.float32)
layouts = {
    'rows of x, all of w': (P('dp'), P()),
    'rows of x, columns of w': (P('dp'), P(None, 'mp')),
    'columns of x, rows of w: each device has a part of the sum': (P(None, 'mp'), P('mp')),
    'rows of x, columns of w, along the same axis': (P('dp'), P(None, 'dp')),
}
for name, specs in layouts.items():
    print(name)
    collectives(auto.plan(product, *auto.shard((a, a), specs)))

# %% [markdown]
# ## Part 3: Per-device code
#
# ### shard_map
#
# So far programs computed on global arrays. `shard_map` takes a function of one device's blocks, with
# explicit communication. `in_specs` define how arguments are cut, `out_specs` how the blocks of results are
# joined. `helper.shard_map` takes rules where `jax.shard_map` takes specs, and reshards arguments with other
# shardings.
#
# Inside, the type of a block contains the mesh axes along which it *varies*: `{V:dp}` differs from device to
# device along `dp`. A value that varies along an axis cannot be returned as replicated along it; JAX checks
# this.


# %%
def block_sum(block):
    print('a block:', jax.typeof(block))
    total = jax.lax.psum(block.sum(axis=0), 'dp')
    print('its sum:', jax.typeof(total))
    return total


mapped = helper.shard_map(block_sum, in_specs=P('dp', 'mp'), out_specs=P('mp'))
print(mapped(x), x.sum(axis=0))

try:
    helper.shard_map(lambda block: block.sum(axis=0), in_specs=P('dp', 'mp'), out_specs=P('mp'))(x)
except ValueError as error:
    print('without psum:', type(error).__name__)

# %% [markdown]
# ### Collectives
#
# | | every device gives | and gets |
# |---|---|---|
# | `psum` | a block | the sum of all blocks |
# | `all_gather(tiled=True)` | a block | all blocks, joined in one dimension (`tiled=False`: in a new one) |
# | `psum_scatter(tiled=True)` | a block | its part of their sum; also called *reduce-scatter* |
# | `all_to_all(tiled=True)` | a part of its block to each | the parts for it, joined |
# | `ppermute` | a block to one other device | a block of another one |
#
# A `psum` is a `psum_scatter` followed by an `all_gather`. An `all_to_all` moves the sharding from one
# dimension to another.


# %%
def show(name, fun, out_specs):
    mapped = auto.shard_map(fun, in_specs=P('dp'), out_specs=out_specs, axis_names='dp')
    y = auto.sjit(mapped)(values)
    print(f'{name:13}', np.asarray(y).astype(int).tolist())
    collectives(auto.plan(auto.sjit(mapped), values))


# Device d along dp has the row [10 d, 10 d + 1, 10 d + 2, 10 d + 3].
values = auto.shard((10 * np.arange(4)[:, None] + np.arange(4)).astype(np.float32), P('dp'))
show('psum', lambda row: jax.lax.psum(row, 'dp'), P())
show(
    'psum_scatter',
    lambda row: jax.lax.psum_scatter(row, 'dp', scatter_dimension=1, tiled=True),
    P(None, 'dp'),
)
show('all_to_all', lambda row: jax.lax.all_to_all(row, 'dp', 1, 0, tiled=True), P(None, 'dp'))
show('ppermute', lambda row: jax.lax.ppermute(row, 'dp', [(i, (i + 1) % 4) for i in range(4)]), P('dp'))
# Each device gathers all, and returns one row of what it has: the one across.
show(
    'all_gather',
    lambda row: jax.lax.all_gather(row, 'dp', tiled=True)[3 - jax.lax.axis_index('dp')][None],
    P('dp'),
)

# %% [markdown]
# ### shard_map composes with transformations
#
# It can be differentiated, mapped with `vmap` and scanned, from outside or inside. The transpose of a
# `psum_scatter` is an `all_gather`, and so on: the collectives of the backward pass follow from those of the
# forward pass. With `axis_names` only some mesh axes are *manual*; the others keep their types.

# %%
mean_square = helper.shard_map(
    lambda block: jax.lax.pmean((block**2).mean(), ('dp', 'mp')), P('dp', 'mp'), P()
)
gradient = helper.sjit(jax.grad(mean_square))(explicit_x)
print(jax.typeof(gradient), bool(jnp.allclose(gradient, 2 * x / x.size)))


def half(block):
    print('manual along dp, Explicit along mp:', jax.typeof(block))
    return 2 * block


print(
    jax.typeof(helper.sjit(helper.shard_map(half, P('dp', 'mp'), P('dp', 'mp'), axis_names='dp'))(explicit_x))
)

# %% [markdown]
# ## Part 4: Mixing
#
# ### Axes of several types
#
# Each axis of a mesh has its own type. An array's type then contains the Explicit axes, and the compiler
# decides about the others. A dimension of an array may be sharded over axes of one type only.

# %%
mixed = MeshShardingHelper([4, 2], ['dp', 'mp'], axis_types=[AxisType.Explicit, AxisType.Auto])
mixed_x = mixed.shard(x, P('dp', 'mp'))
print(mixed_x.sharding.spec, jax.typeof(mixed_x))

# %% [markdown]
# ### auto_axes: leaving part of a program to the compiler
#
# Inside JAX's `auto_axes` Explicit axes are Auto, so the compiler handles operations that JAX cannot
# resolve. Results need types again, given by `out_sharding`: a spec, or a tree of specs.


# %%
@jax.sharding.auto_axes(out_sharding=P('dp', 'mp'))
def symmetric(x):
    print('inside: ', jax.typeof(x))
    return x + x.T


print('outside:', jax.typeof(helper.sjit(symmetric)(square)))


@jax.sharding.auto_axes(axes='mp', out_sharding=P('dp', 'mp'))
def half_auto(x):
    print('mp only:', jax.typeof(x))
    return 2 * x


print('outside:', jax.typeof(helper.sjit(half_auto)(square)))

# %% [markdown]
# ### explicit_axes: types in part of a program
#
# The reverse, in a program over Auto axes. Arguments need types, given by `in_sharding`. Results lose theirs:
# from there on the compiler decides.


# %%
@jax.sharding.explicit_axes(in_sharding=P('dp', 'mp'))
def typed(x):
    print('inside: ', jax.typeof(x), jax.typeof(x.sum(axis=1)))
    return 2 * x


y = auto.sjit(typed)(a)
print('outside:', jax.typeof(y), y.sharding.spec)

# %% [markdown]
# ### The sharding of an array and of its type
#
# `.sharding` is the sharding of a concrete array over all axes; values that are being traced do not have it.
# `jax.typeof(x).sharding` is known during tracing, and has only the Explicit axes. On Auto axes the two
# differ.

# %%
for name, each in {'Explicit': explicit_x, 'Auto': auto_x, 'dp Explicit, mp Auto': mixed_x}.items():
    print(f'{name:21} is sharded as {each.sharding.spec!s:17} has the type {jax.typeof(each).sharding.spec}')

# %% [markdown]
# ### FSDP in practice
#
# *Fully sharded data parallelism*: each device has a part of every parameter and of the batch. This is the
# network, for one device. It names a value, `hidden`, and no mesh axis.


# %%
def init(key, width=64, hidden=256):
    up, down = jax.random.split(key)
    return {
        'up': jax.random.normal(up, (width, hidden)) / np.sqrt(width),
        'down': jax.random.normal(down, (hidden, width)) / np.sqrt(hidden),
    }


def network(params, x):
    hidden = with_sharding_annotation(jax.nn.gelu(x @ params['up']), 'hidden')
    return hidden @ params['down']


def loss(params, x):
    return jnp.mean((network(params, x) - x) ** 2)


def train_step(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))


def same(tree, other):
    return all(
        np.allclose(a, b, atol=1e-5) for a, b in zip(*map(jax.tree.leaves, (tree, other)), strict=True)
    )


params = init(jax.random.key(0))
batch = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
on_one_device = jax.jit(train_step)(params, batch)

# %% [markdown]
# With a rule for the parameters and a spec for the batch, it runs on eight devices. The collectives show
# whether this is FSDP, in which parameters are gathered before each layer. Each parameter has 65,536 bytes.
# With 4,096 examples it is: `sjit` keeps activations sharded along the batch dimension. 32 examples have
# 8,192 bytes: to send all of them to all devices takes less than to gather the parameters, so `sjit` leaves
# their sharding to the compiler. (A plan compiles but does not run: shapes are enough.)

# %%
fsdp = MeshShardingHelper([-1], ['fsdp'])
rule = FSDPShardingRule(min_fsdp_size=1024)
layout = {'in_shardings': (rule, P('fsdp')), 'out_shardings': rule}
step = fsdp.sjit(train_step, **layout)
for examples in (4096, 32):
    print(f'{examples} examples')
    collectives(fsdp.plan(step, params, jax.ShapeDtypeStruct((examples, 64), np.float32)))

# %% [markdown]
# To say yourself where a value is, bind its name: here the hidden values get the sharding of the batch. Then
# parameters are gathered for 32 examples as well. Gradients are summed, with each device keeping its part.
# (The plan shows an all-reduce for these; if only a part of an all-reduce is kept, the compilers for TPUs and
# GPUs turn it into a reduce-scatter.)

# %%
step = fsdp.sjit(train_step, **layout, annotation_shardings={'hidden': P('fsdp')})
stepped = step(params, batch)
print({name: str(p.sharding.spec) for name, p in stepped.items()})
print('as on one device:', same(stepped, on_one_device))
collectives(fsdp.plan(step, params, batch))

# %%
fsdp.visualize(stepped)

# %% [markdown]
# ### Tensor parallelism in practice
#
# Each device computes a part of each layer. `up` is sharded by columns, so the hidden values are sharded,
# without communication: `gelu` works on each part by itself. `down` is sharded by rows, along the contracted
# dimension, so each device has a part of the sum: *one* all-reduce per layer in the forward pass, none
# between the two products.

# %%
tensor_parallel = TreePathShardingRule(('up', P(None, 'mp')), ('down', P('mp')))
forward = auto.sjit(network, in_shardings=(tensor_parallel, P('dp')), out_shardings=P('dp'))
collectives(auto.plan(forward, params, batch))
assert_collectives(forward, params, batch, all_reduce={'mp': 1}, all_gather=0, all_to_all=0)

step = auto.sjit(train_step, in_shardings=(tensor_parallel, P('dp')), out_shardings=tensor_parallel)
stepped = step(params, batch)
print('as on one device:', same(stepped, on_one_device))
collectives(auto.plan(step, params, batch))

# %% [markdown]
# Biases are sharded like the results that they are added to: that of `up` by columns. That of `down` is added
# to the sum, so it is replicated along `mp`. It adds no communication.


# %%
def dense(layer, x):
    return x @ layer['kernel'] + layer['bias']


def with_biases(layers, x):
    return dense(layers['down'], jax.nn.gelu(dense(layers['up'], x)))


layers = {name: {'kernel': kernel, 'bias': np.ones(kernel.shape[1])} for name, kernel in params.items()}
biased = TreePathShardingRule(
    ('up/kernel', P(None, 'mp')),
    ('up/bias', P('mp')),
    ('down/kernel', P('mp')),
    ('down/bias', P()),
)
forward = auto.sjit(with_biases, in_shardings=(biased, P('dp')), out_shardings=P('dp'))
print('as on one device:', same(forward(layers, batch), with_biases(layers, batch)))
collectives(auto.plan(forward, layers, batch))

# %% [markdown]
# The two combine: `tensor_parallel & FSDPShardingRule('dp')` fills the dimensions that tensor parallelism
# left free. On Explicit axes the same program needs one `out_sharding`, at the product whose sum is
# distributed:


# %%
def explicit_network(params, x):
    hidden = jax.nn.gelu(x @ params['up'])
    print('hidden:', jax.typeof(hidden))
    return jnp.einsum('bh,hd->bd', hidden, params['down'], out_sharding=P('dp'))


forward = helper.sjit(explicit_network, in_shardings=(tensor_parallel, P('dp')))
print('result:', jax.typeof(forward(params, batch)))
collectives(helper.plan(forward, params, batch))
both = tensor_parallel & FSDPShardingRule('dp', min_fsdp_size=1024)
print(jax.tree.map(lambda p: str(p.spec), auto.match_sharding_rule(both, params)))

# %% [markdown]
# ### Next steps
#
# - [Rules](rules.md), [sjit](sjit.md), [data](data.md); the [cookbook](cookbook.md) has training layouts.
# - `examples/ring_attention.py` and `examples/expert_parallel.py` use `helper.shard_map`: attention over
#   sequences that are sharded over devices, and experts that receive tokens from other devices.
# - [planning.md](planning.md): the same counts for hardware you do not have.
