# %% [markdown]
# # FSDP x TP on eight simulated devices
#
# A small language model, written for one device, is trained on a mesh of eight: four groups that shard the
# parameters and the batch (FSDP), of two devices each that share every layer (tensor parallelism, TP). The
# model does not change. Runs from a fresh kernel on any machine, in less than a minute.

# %%
import jax
import jax.numpy as jnp
import numpy as np

from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

jax.config.update('jax_num_cpu_devices', 8)  # before JAX looks for its devices

# %% [markdown]
# ## The model, for one device
#
# Blocks of attention and an MLP, the next token as the target, and a step of gradient descent.

# %%
VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, 4


def init(key):
    shapes = {'qkv': (WIDTH, 3 * WIDTH), 'out': (WIDTH, WIDTH), 'up': (WIDTH, 512), 'down': (512, WIDTH)}
    keys = iter(jax.random.split(key, LAYERS * len(shapes) + 1))

    def layer():
        return {
            name: jax.random.normal(next(keys), shape) / shape[0] ** 0.5 for name, shape in shapes.items()
        }

    embed = jax.random.normal(next(keys), (VOCABULARY, WIDTH)) / WIDTH**0.5
    return {'embed': embed, 'layers': [layer() for _ in range(LAYERS)]}


def block(x, weights):
    rows, length, _ = x.shape
    q, k, v = jnp.split((x @ weights['qkv']).reshape(rows, length, HEADS, -1), 3, axis=-1)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + attended @ weights['out']
    return x + jax.nn.gelu(x @ weights['up']) @ weights['down']


def loss(params, tokens):
    x = params['embed'][tokens[:, :-1]]
    for weights in params['layers']:
        x = block(x, weights)
    scores = jax.nn.log_softmax(x @ params['embed'].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


def train_step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


params = init(jax.random.key(0))
batches = np.random.default_rng(0).integers(0, VOCABULARY, (3, 16, 65), dtype=np.int32)
one = params
for tokens in batches:
    one, value = jax.jit(train_step)(one, tokens)
    print(f'loss on one device: {value:.4f}')

# %% [markdown]
# ## The mesh and the rule
#
# `qkv` and `up` are sharded by columns over `tp`, `out` and `down` by rows: between the two products of a
# pair nothing is communicated. `& FSDPShardingRule('fsdp')` shards what is left over `fsdp`. The report shows
# what each parameter gets, and why; nothing has been placed yet.

# %%
helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
tensor_parallel = TreePathShardingRule(('qkv|up', P(None, 'tp')), ('out|down', P('tp')), ('embed', P('tp')))
rule = tensor_parallel & FSDPShardingRule('fsdp', min_fsdp_size=1024)
helper.explain(params, rule)

# %% [markdown]
# ## The same step on eight devices
#
# `sjit` compiles the same `train_step`, with the rule for the parameters and rows over `fsdp` for the tokens.
# The losses are those of one device.

# %%
step = helper.sjit(train_step, in_shardings=(rule, P('fsdp')), out_shardings=(rule, None), donate_argnums=0)
sharded = helper.shard(params, rule)
for tokens in batches:
    sharded, value = step(sharded, tokens)
    print(f'loss on eight devices: {value:.4f}')
same = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-4)), helper.gather(sharded), one)
print('the parameters are the same:', all(jax.tree.leaves(same)))

# %% [markdown]
# Each device holds an eighth of every matrix:

# %%
helper.visualize({'up': sharded['layers'][0]['up'], 'down': sharded['layers'][0]['down']})

# %% [markdown]
# ## What it costs
#
# A plan compiles the step without running it, and says what each device holds and sends. Parameters are
# gathered over `fsdp`, and their gradients are summed there; the products of `out` and `down` are summed over
# `tp`.

# %%
plan = helper.plan(step, sharded, batches[0])
for row in sorted(plan.collectives, key=lambda row: -row.count * row.bytes)[:12]:
    why = row.reason or row.phase
    print(f'{row.count:3} x {row.kind} over {", ".join(row.axes)}, {row.bytes:,} bytes each: {why}')

# %% [markdown]
# Other layouts are other rules, not other models: [rules.md](../rules.md) has the common ones, and
# [planning.ipynb](planning.ipynb) compares them before there are devices to run on.
