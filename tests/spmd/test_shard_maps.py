"""`shard_map` inside a step: over batch axes, over other axes, and over both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from scalax._jax.equations import all_equations
from scalax._spmd.step import PartitionedStep, StepArgument, StepResult, partition_step, run_step
from tests.support.partitioned import P, assert_equal, state_spec

pytestmark = pytest.mark.medium

RNG = np.random.default_rng(0)
W = {'a': np.asarray(RNG.normal(size=(8, 16)) / 4, 'f'), 'b': np.asarray(RNG.normal(size=(16, 8)) / 4, 'f')}
X = np.asarray(RNG.normal(size=(16, 8)), 'f')
FSDP, HSDP, TP = {'fsdp': 8}, {'replica': 2, 'fsdp': 4}, {'fsdp': 4, 'tp': 2}
BOTH = ('replica', 'fsdp')


def local(w, x):
    return jnp.tanh(x @ w['a']) @ w['b']


def summed(w, x):
    return lax.psum(jnp.tanh(x @ w['a']).sum(0), 'fsdp') + x @ w['a']


def numbered(w, x):
    return jnp.tanh(x @ w['a']) + 10 * lax.axis_index('fsdp')


def exchanging(w, x):
    """All collectives, along an axis of two or more devices."""
    y = jnp.tanh(x @ w['a'])
    gathered = (
        lax.all_gather(y, 'fsdp', axis=1, tiled=True) + lax.all_gather(y, 'fsdp').sum(0).sum(1)[:, None]
    )
    parts = lax.psum_scatter(gathered, 'fsdp', scatter_dimension=1, tiled=True)
    moved = lax.all_to_all(gathered, 'fsdp', 1, 1, tiled=True)[:, :16]
    size = lax.axis_size('fsdp')
    shifted = lax.ppermute(y, 'fsdp', [(i, (i + 1) % size) for i in range(size)])
    return parts + moved + shifted + lax.pmax(lax.stop_gradient(y), 'fsdp') + lax.pmean(y, 'fsdp')


def in_a_loop(w, x):
    size = lax.axis_size('fsdp')

    def rotate(x, _):
        y = jnp.tanh(x @ w['a']) @ w['b']
        return lax.ppermute(y, 'fsdp', [(i, (i + 1) % size) for i in range(size)]), y.sum(1)

    last, sums = lax.scan(rotate, x, None, 3)
    return last + sums.sum(0)[:, None]


def tensor_parallel(w, x):
    return lax.psum(jnp.tanh(x @ w['a']) @ w['b'], 'tp')


def tensor_parallel_and_mean(w, x):
    return tensor_parallel(w, x) + lax.pmean(x, 'fsdp').sum()


def numbered_in_both(w, x):
    return jnp.tanh(x @ w['a']) + lax.axis_index('tp') + 10 * lax.axis_index('fsdp')


SPLIT = {'a': P(None, 'tp'), 'b': P('tp')}
# (mesh, body, specs of weights and examples, spec of the result, manual axes, are examples gathered)
CASES = {
    'one axis': (FSDP, local, (P(), P('fsdp')), P('fsdp'), None, False),
    'one axis, a sum': (FSDP, summed, (P(), P('fsdp')), P('fsdp'), None, False),
    'one axis, a loop': (FSDP, in_a_loop, (P(), P('fsdp')), P('fsdp'), None, False),
    'two axes': (HSDP, summed, (P(), P(BOTH)), P(BOTH), None, False),
    'one of two axes': (HSDP, summed, (P(), P('fsdp')), P('fsdp'), {'fsdp'}, True),
    'the second of two axes': (
        *(HSDP, lambda w, x: local(w, x) + lax.pmean(x, 'replica'), (P(), P('replica'))),
        *(P('replica'), {'replica'}, False),
    ),
    'features over one of two axes': (
        *(HSDP, exchanging, ({'a': P('fsdp'), 'b': P()}, P(None, 'fsdp')), P(None, 'fsdp'), {'fsdp'}, True),
    ),
    'two axes in another order': (HSDP, summed, (P(), P(BOTH[::-1])), P(BOTH[::-1]), None, True),
    'another axis': (TP, tensor_parallel, (SPLIT, P()), P(), {'tp'}, False),
    'both': (TP, tensor_parallel_and_mean, (SPLIT, P('fsdp')), P('fsdp'), {'fsdp', 'tp'}, False),
    'both, the batch first': (
        *(TP, numbered_in_both, (P(), P(('fsdp', 'tp'))), P(('fsdp', 'tp')), {'fsdp', 'tp'}, False),
    ),
    'both, the batch last': (
        *(TP, numbered_in_both, (P(), P(('tp', 'fsdp'))), P(('tp', 'fsdp')), {'fsdp', 'tp'}, True),
    ),
}


def partitioned(fun, mesh_axes) -> tuple[PartitionedStep, list[jax.Array], list[jax.Array]]:
    """Partitions a function of weights and examples; returns its results, and JAX's."""
    mesh = jax.make_mesh((*mesh_axes.values(),), (*mesh_axes,), axis_types=(AxisType.Auto,) * len(mesh_axes))
    axes, size = tuple([axis for axis in mesh_axes if axis != 'tp']), mesh_axes['fsdp']
    leaves = jax.tree.leaves(W)
    arguments = [StepArgument(state_spec(leaf.shape, size=size), False, 'w') for leaf in leaves]
    arguments.append(StepArgument(P(axes), True, 'x'))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(fun)(W, X)
        results = [StepResult(None, '')] * len(jaxpr.out_avals)
        step = partition_step(jaxpr, arguments, results, mesh.abstract_mesh, axes)

    def inside(*values):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run_step(step, values, mesh, 'step')

    run_results = [*jax.jit(inside)(*leaves, X)]
    with jax.set_mesh(mesh):
        return step, run_results, jax.tree.leaves(jax.jit(fun)(W, X))


@pytest.mark.parametrize(
    ('name', 'check_vma'), [*[(name, True) for name in CASES], ('one axis, a sum', False), ('both', False)]
)
@pytest.mark.sampled(4)
def test_values_of_a_step(name, check_vma):
    mesh_axes, body, in_specs, out_specs, manual, gathers = CASES[name]
    axes = {} if manual is None else {'axis_names': manual}

    def step(w, x):
        mapped = jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, **axes)

        def loss(w, x):
            return jnp.mean(jnp.tanh(mapped(w, jnp.sin(x))) ** 2)

        value, gradients = jax.value_and_grad(loss)(w, x)
        return value, jax.tree.map(lambda a, b: a - b, w, gradients), mapped(w, x)

    partitioned_step, values, expected = partitioned(step, mesh_axes)
    assert_equal(values, expected)
    assert any(row.what == 'examples' for row in partitioned_step.collective_rows) == gathers
    # The shard_map along other axes remains.
    mapped = [
        equation
        for equation in all_equations(partitioned_step.jaxpr)
        if equation.primitive.name == 'shard_map'
    ]
    assert bool(mapped) == bool(manual and 'tp' in manual)


def test_nested_shard_maps():
    def inner(x):
        return lax.psum(x, 'tp') + lax.pmean(x, 'fsdp')

    def outer(x):
        nested = jax.shard_map(inner, in_specs=P(None, 'tp'), out_specs=P(None, 'tp'), axis_names={'tp'})
        return jnp.tanh(lax.pmean(x, 'fsdp') + nested(x) + lax.axis_index('fsdp'))

    def step(w, x):
        x = x @ w['a']
        mapped = jax.shard_map(outer, in_specs=P('fsdp'), out_specs=P('fsdp'), axis_names={'fsdp'})
        return mapped(x) @ w['b']

    partitioned_step, values, expected = partitioned(step, TP)
    assert_equal(values, expected)
    assert not any(row.what == 'examples' for row in partitioned_step.collective_rows)


def wide(w, x):
    """The residuals that JAX saves have blocks of examples inside blocks of tp."""
    return lax.psum(jnp.tanh(jnp.sin(x @ w['a'])) @ w['b'], 'tp')


@pytest.mark.parametrize(
    'keeps', ['each layer', 'a rematerialized loop', 'a loop', 'a loop in a loop', 'values with other uses']
)
def test_backward_passes_use_the_blocks_of_residuals(keeps):
    specs = {'a': P(None, 'tp'), 'b': P('tp')}

    def step(w, x):
        mapped = jax.shard_map(wide, in_specs=(specs, P()), out_specs=P(), axis_names={'tp'})
        kept = jax.shard_map(
            lambda w, x: x @ w['a'], in_specs=(specs, P()), out_specs=P('tp'), axis_names={'tp'}
        )

        def loss(w, x):
            if keeps == 'a rematerialized loop':
                layer = jax.checkpoint(lambda x, _: (x + mapped(w, x), None))
                return jnp.mean(lax.scan(layer, x, None, 3)[0] ** 2)
            if keeps in ('a loop', 'a loop in a loop'):

                def layer(x, _):
                    return x + jnp.sin(mapped(w, x)), None

                def layers(x, _):
                    return lax.scan(layer, x, None, 2)[0], None

                return jnp.mean(lax.scan(layer if keeps == 'a loop' else layers, x, None, 3)[0] ** 2)
            x = x + mapped(w, x)
            return jnp.mean((x + mapped(w, x)) ** 2)

        value, gradients = jax.value_and_grad(loss)(w, x)
        blocks = kept(w, x) if keeps == 'values with other uses' else ()
        return value, jax.tree.map(lambda a, b: a - b, w, gradients), blocks

    partitioned_step, values, expected = partitioned(step, TP)
    assert_equal(values, expected)
    assert not any(row.what == 'examples' for row in partitioned_step.collective_rows)


def test_blocks_pass_from_one_shard_map_to_another_and_are_joined_for_other_uses():
    def step(w, x):
        specs = {'a': P(None, 'tp'), 'b': P('tp')}
        first = jax.shard_map(
            lambda w, x: jnp.tanh(x @ w['a']), in_specs=(specs, P()), out_specs=P('tp'), axis_names={'tp'}
        )
        second = jax.shard_map(
            lambda w, y: lax.psum(y @ w['b'], 'tp'),
            in_specs=(specs, P('tp')),
            out_specs=P(),
            axis_names={'tp'},
        )
        blocks = first(w, x)
        return second(w, blocks), blocks, blocks[::-1].sum(0), second(w, blocks[::-1])

    partitioned_step, values, expected = partitioned(step, TP)
    assert_equal(values, expected)
    assert partitioned_step.collective_rows
