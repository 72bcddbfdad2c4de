# %% [markdown]
# # Planning a training step
#
# How much memory does a step need, what does it send, and how fast can it be? A plan compiles the step and
# reads the compiled program. Nothing runs, so shapes are enough, and a laptop can plan for a pod.
#
# The first part needs only JAX. The other parts need XLA's compilers for GPUs and TPUs, but no GPU or TPU
# (on Linux, `pip install "jax[cuda12-local]"` and `"jax[tpu]"`). If a compiler is missing, the cell says
# so.

# %%
import importlib.util

import jax
import jax.numpy as jnp

from scalax.errors import MissingDependencyError
from scalax.plan import search
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

jax.config.update('jax_num_cpu_devices', 8)  # before JAX looks for its devices

# %% [markdown]
# ## The step
#
# Eight layers of an MLP, as a `scan`. `jax.checkpoint` recomputes activations in the backward pass.
# `params` and `batch` are shapes: the 0.5 GiB of weights are never allocated.


# %%
def train_step(params, batch):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights['up']) @ weights['down'], None

    def loss(params):
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), batch, params)[0].astype('float32')).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


params = {
    'up': jax.ShapeDtypeStruct((8, 2048, 8192), 'bfloat16'),
    'down': jax.ShapeDtypeStruct((8, 8192, 2048), 'bfloat16'),
}
batch = jax.ShapeDtypeStruct((16384, 2048), 'bfloat16')


def make_step(helper, rule):
    step = helper.sjit(
        train_step, in_shardings=(rule, P('fsdp')), out_shardings=(rule, None), donate_argnums=0
    )
    return step, (params, batch)


fsdp = FSDPShardingRule('fsdp', min_fsdp_size=1).stacked()
tensor_parallel = TreePathShardingRule(('up', P(None, None, 'tp')), ('down', P(None, 'tp')))

# %% [markdown]
# ## On simulated devices
#
# Plan FSDP on eight simulated CPU devices. The collectives are those of XLA's partitioner, which are the
# same for all hardware. Simulated devices have no speed, so the roofline uses the specs of a TPU v5e.

# %%
helper = MeshShardingHelper([8], ['fsdp'])
step, arguments = make_step(helper, fsdp)
plan = helper.plan(step, *arguments)
for row in plan.collectives[:4]:
    print(f'{row.count:3} x {row.kind} over {", ".join(row.axes)}, {row.bytes:,} bytes each')
roofline = plan.roofline('v5e', torus={'fsdp': 8})
print(f'bound by {roofline.bottleneck}; at most {roofline.mfu:.0%} of the peak')

# %% [markdown]
# ## On GPUs you don't have
#
# `h100:8` is a host of eight H100. `search` compiles the step on every mesh and ranks the meshes. (Takes a
# few seconds. Needs XLA's compiler for GPUs.)

# %% tags=["gpu"]
both = tensor_parallel & fsdp


def search_on_gpus():
    try:
        return search(lambda helper: make_step(helper, both), 'h100:8', ['fsdp', 'tp'])
    except MissingDependencyError as error:
        return error


print(search_on_gpus())

# %% [markdown]
# ## On TPUs you don't have
#
# The cell below compiles in the notebook's own process, so a crash of the TPU compiler ends the notebook. To
# plan safely, write the step to a file, run `!scalax plan train.py:make_step ... --json > plan.json`, and
# load the result with `Plan.load('plan.json')`
# ([how](../planning_tpu.md#when-the-compiler-crashes-or-ends-a-notebook)).
#
# A quick plan stops after the TPU compiler has assigned memory. For exact figures use `quick=False`, which
# also generates code. (**Slow**: takes up to a minute. Needs the TPU compiler.)


# %% tags=["tpu", "slow"]
def plan_on_tpus():
    if importlib.util.find_spec('libtpu') is None:
        return 'the TPU compiler is not installed: pip install "jax[tpu]"'
    tpus = MeshShardingHelper.from_topology('v5e:2x4', [8], ['fsdp'])
    step, arguments = make_step(tpus, fsdp)
    return tpus.plan(step, *arguments, quick=True)


plan_on_tpus()

# %% [markdown]
# ## Next steps
#
# - `print(plan)` prints the same as text, and `plan.diff(other)` compares two plans.
# - In a terminal, use `scalax plan`, `scalax search` and `scalax autoshard`
#   ([command_line.md](../command_line.md)).
# - [planning.md](../planning.md) explains how to read a plan, and
#   [estimates.md](../estimates.md) how the numbers are made and how far to trust them.
