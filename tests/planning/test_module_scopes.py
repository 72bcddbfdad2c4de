"""Modules, named scopes and functions of instructions, from op names and stack frames."""

import jax
import jax.numpy as jnp
import pytest

from scalax._planning.program.module_scopes import scopes_in
from scalax._planning.report.breakdown import costs_by_phase, costs_by_scope
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
X = jax.ShapeDtypeStruct((64, 64), 'float32')


@pytest.mark.parametrize(
    ('op_name', 'names'),
    [
        ('', []),
        ("state.params['layers']", []),
        ('jit(step)/dot_general', []),
        ('jit(step)/jit(inner)/vmap(jit(silu))/mul', []),
        ('jit(step)/jvp(Model)/layers_0/up/dot_general', ['Model', 'layers_0', 'up']),
        ('jit(step)/transpose(jvp(Model))/layers_0/up/dot_general', ['Model', 'layers_0', 'up']),
        ('jit(f)/transpose(jvp(Model))/jvp(Model)/checkpoint/rematted_computation/up/dot', ['Model', 'up']),
        ('jit(f)/jvp(Model)/Model/dot', ['Model', 'Model']),  # a module of the same name inside
        ('jit(f)/jvp(while)/body/eval_jaxpr/mlp/dot', ['mlp']),
        ('jit(f)/while/cond/lt', []),
        ('jit(f)/cond/branch_1_fun/expert/dot', ['expert']),
        ('jit(f)/body/dot', ['body']),  # without a loop, it is the user's scope
        ('jit(f)/vmap(head/x)/bi,ij->bj/dot', ['head', 'x']),
        ('jit(f)/loss(1)/mul', ['loss(1)']),
        ('jit(f)/annotation(x)/sharding_constraint', []),
        ('jit(f)/jvp(broken/dot', []),  # a single name in an open bracket is the primitive
    ],
)
def test_named_scopes_of_an_operation(op_name, names):
    assert scopes_in(op_name) == names


def planned(step, *args, **shardings):
    return HELPER.plan(HELPER.sjit(step, **shardings), *args)


def is_whole(plan):
    """Returns whether the scopes add up to the step."""
    work = plan.device_cost
    assert sum(row.flops for row in work.by_scope) == work.flops > 0
    assert sum(row.bytes for row in work.by_scope) == work.bytes
    for phase, flops in work.by_phase.items():
        assert sum(row.flops for row in work.by_scope if row.phase == phase) == flops
    for row in plan.collectives:
        assert sum(runs.count for runs in row.scopes) == row.count
    moved = sum(row.count * row.bytes for row in plan.collectives)
    by_phase = costs_by_phase(plan, None)
    assert sum(entry.collective_bytes for entry in by_phase.values()) == moved
    return True


def flops_of(plan, scope):
    return {row.phase: row.flops for row in plan.device_cost.by_scope if row.scope == scope}


@pytest.mark.medium
def test_scopes_of_a_scan_with_checkpoint():
    def step(w, x):
        @jax.checkpoint
        def layer(x, w):
            with jax.named_scope('mlp'):
                return jnp.tanh(jnp.einsum('bi,ij->bj', x, w)), None

        def loss(w):
            with jax.named_scope('decoder'):
                x_, _ = jax.lax.scan(layer, x, w)
            return jnp.square(x_).sum()

        return jax.grad(loss)(w)

    plan = planned(step, jax.ShapeDtypeStruct((3, 64, 64), 'float32'), X, in_shardings=(P(), P('fsdp')))
    assert is_whole(plan)
    once = 3 * 2 * 16 * 64 * 64  # three layers, 16 rows on each device
    assert flops_of(plan, 'decoder/mlp') == {'forward': once, 'recomputed': once, 'backward': 2 * once}
    assert {runs.scope for row in plan.collectives for runs in row.scopes} >= {'decoder/mlp'}


def attention(w, x):
    return jnp.tanh(x @ w)


def test_functions_stand_for_scopes():
    def step(w, x):
        def loss(w):
            return jnp.square(attention(w, x) @ w).sum()

        return jax.grad(loss)(w)

    plan = planned(step, X, X, in_shardings=(P('fsdp', 'tp'), P('fsdp')))
    assert is_whole(plan)
    assert {row.scope for row in plan.device_cost.by_scope} == {'step()/loss()', 'step()/loss()/attention()'}
    (outer, outer_cost), (inner, inner_cost) = costs_by_scope(plan, None)
    assert (outer, inner) == ('step()/loss()', 'step()/loss()/attention()')
    assert outer_cost.flops == plan.device_cost.flops > inner_cost.flops > 0
    lines = plan.to_text(100).splitlines()
    table = next(index for index, line in enumerate(lines) if line.startswith('function'))
    assert [line.split('  ')[0] for line in lines[table + 2 : table + 4]] == [outer, inner]


@pytest.mark.medium
def test_modules_of_flax():
    nn = pytest.importorskip('flax.linen')

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(64, name='down')(nn.gelu(nn.Dense(128, name='up')(x)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(4):
                x = nn.remat(Block)(name=f'layers_{i}')(x)
            return x

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def step(params, x):
        return jax.grad(lambda params: jnp.square(model.apply(params, x)).sum())(params)

    plan = planned(step, params, X, in_shardings=(P(), P('fsdp')), batch_argnums=())
    assert is_whole(plan)
    matmul_flops = 2 * 16 * 64 * 128
    assert flops_of(plan, 'Model/layers_2/up') == {
        'forward': matmul_flops,
        'recomputed': matmul_flops,
        'backward': 2 * matmul_flops,
    }
    # The first layer has no gradient of its input, and is still one of four.
    layers = 'Model/layers_{0..3}'
    assert [name for name, _ in costs_by_scope(plan, None)][:3] == [layers, f'{layers}/up', f'{layers}/down']
    assert 'By module and named scope' in plan._repr_html_()


@pytest.mark.medium
def test_equinox_modules_are_distinguished_by_functions():
    eqx = pytest.importorskip('equinox')

    class Block(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x):
            return x + self.down(jax.nn.gelu(self.up(x)))

    class Model(eqx.Module):
        block: Block
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(self.block(x))

    def make(key):
        return Model(
            Block(eqx.nn.Linear(64, 128, key=key), eqx.nn.Linear(128, 64, key=key)),
            eqx.nn.Linear(64, 32, key=key),
        )

    def step(model, x):
        return jax.grad(lambda model: jnp.square(jax.vmap(model)(x)).sum())(model)

    plan = planned(step, jax.eval_shape(make, jax.random.key(0)), X, in_shardings=(P(), P('fsdp')))
    assert is_whole(plan)
    inside = 'step()/<lambda>()/Model()'
    head = 2 * 16 * 64 * 32
    assert flops_of(plan, f'{inside}/eqx.nn.Linear') == {'forward': head, 'backward': 2 * head}
    block = flops_of(plan, f'{inside}/Block()/eqx.nn.Linear')
    assert block['forward'] == 2 * (2 * 16 * 64 * 128)


def test_any_number_of_scopes_inside_of_one_another():
    def step(x):
        with jax.named_scope('/'.join('d' * 200)):
            return x @ x

    plan = planned(step, X, in_shardings=P('fsdp'))
    assert is_whole(plan)
    assert plan.device_cost.by_scope[0].scope == '/'.join('d' * 200)
    plan._repr_html_()
    assert str(plan)


def test_cells_of_notebooks_are_named():
    """IPython compiles a cell under a file name that does not exist."""
    scope = {'jnp': jnp}
    code = 'def step(x):\n    return (x @ x).sum()\n'
    exec(compile(code, '/tmp/ipykernel_81/1220511822.py', 'exec'), scope)
    plan = planned(scope['step'], X, in_shardings=P('fsdp'))
    sources = {str(row.source) for row in plan.collectives}
    assert sources and all(source.startswith('notebook:2 step') for source in sources)
    assert '1220511822' not in str(plan) + plan._repr_html_()
