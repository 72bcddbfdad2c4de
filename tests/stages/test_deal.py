"""How rows are dealt in microbatches, where stacks of layers move, and what loops compute themselves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._jax.equations import loop_of, makers_of, opened, shape_of
from scalax._jax.rewriting import replaced, run
from scalax._jaxprs.rows import Rows
from scalax._spmd.layer_groups import _steps
from scalax._stages.constants import with_own_constants
from scalax._stages.deal import Deal
from scalax._stages.layers import Stack

DEALS = [
    Deal(24, parts, 'stage', sizes)
    for parts, sizes in itertools.product(
        (3, 4, 6),
        (
            (('stage', 2), ('fsdp', 2)),
            (('fsdp', 2), ('stage', 2)),
            (('stage', 3),),
            (('dp', 2), ('stage', 2), ('fsdp', 1)),
        ),
    )
    if 24 % (parts * np.prod([size for name, size in sizes if name != 'stage'])) == 0
]
PLACES = [(Rows(0), (24, 5)), (Rows(1), (5, 24)), (Rows(1, 3), (2, 72, 2))]


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('rows, shape', PLACES)
@pytest.mark.parametrize('deal', DEALS, ids=str)
def test_each_row_is_in_one_microbatch(deal, rows, shape):
    x = np.arange(np.prod(shape)).reshape(shape)
    dealt = np.asarray(deal.of(jnp.asarray(x), rows))
    assert dealt.shape[:2] == (deal.microbatches // deal.owners, deal.owners)
    np.testing.assert_array_equal(deal.back(jnp.asarray(dealt), rows), x)
    for i in range(deal.microbatches):
        mine = np.asarray(deal.microbatch(jnp.asarray(x), rows, i))
        np.testing.assert_array_equal(mine, dealt[i // deal.owners, i % deal.owners])
        assert mine.shape[rows.dim] == deal.size(rows)


def test_the_elements_of_a_row_stay_together():
    tokens = np.repeat(np.arange(24), 3)
    tokens = np.asarray(DEALS[0].microbatch(jnp.asarray(tokens), Rows(0, 3), 1)).reshape(-1, 3)
    assert (tokens == tokens[:, :1]).all()


def test_dealing_moves_nothing():
    mesh = jax.make_mesh((2, 4), ('stage', 'fsdp'), axis_types=(AxisType.Auto,) * 2)
    deal = Deal(64, 4, 'stage', (('stage', 2), ('fsdp', 4)))
    rows, parts = NamedSharding(mesh, P(('stage', 'fsdp'))), NamedSharding(mesh, P(None, 'stage', 'fsdp'))
    x = jax.ShapeDtypeStruct((64, 8), 'float32', sharding=rows)
    text = jax.jit(lambda x: deal.of(x, Rows(0)), out_shardings=parts).lower(x).compile().as_text()
    assert 'all-' not in text and 'collective' not in text


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('rounds', [2, 3, 4, 5, 6, 8])
def test_groups_of_layers_move_to_the_stages_that_run_them(rounds):
    mesh = jax.make_mesh((4, 2), ('stage', 'fsdp'), axis_types=(AxisType.Auto,) * 2)
    deal = Deal(64, 4, 'stage', (('stage', 4), ('fsdp', 2)))
    stack, layers = Stack(deal, None, rounds), 8 * rounds
    x = jax.device_put(np.arange(layers), NamedSharding(mesh, P('stage')))
    with jax.set_mesh(mesh):
        moved = jax.jit(stack.of)(x)
        np.testing.assert_array_equal(jax.jit(stack.back)(moved), x)
    groups = np.asarray(moved).reshape(4, rounds, -1)
    for stage, round_ in itertools.product(range(4), range(rounds)):
        group = round_ * 4 + stage
        np.testing.assert_array_equal(groups[stage, round_], group * 2 + np.arange(2))


@pytest.mark.parametrize('stages', range(2, 17))
def test_in_each_step_a_stage_sends_one_group_and_gets_one(stages):
    for rounds in range(2, 13):
        steps = [*_steps(stages, rounds)]
        for moves in steps:
            assert [each.start for each in moves] == [*range(stages)] == sorted(each.end for each in moves)
        every = itertools.chain.from_iterable(steps)
        groups = {(each.start * rounds + each.stored, each.end + each.run * stages) for each in every}
        assert groups == {(group, group) for group in range(stages * rounds)}


def _loop_of(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    [equation] = [each for each in jaxpr.eqns if each.primitive.name == 'scan']
    return jaxpr, equation


def test_loops_compute_masks_themselves():
    def fun(w, x):
        mask = jnp.broadcast_to((jnp.arange(6) < 3)[None, :, None], (16, 6, 4))
        return jax.lax.scan(lambda c, w: (jnp.tanh(jax.lax.select(mask, c, w * c)), None), x, w)[0]

    w, x = np.ones((3, 16, 6, 4), np.float32), np.ones((16, 6, 4), np.float32)
    jaxpr, before = _loop_of(fun, w, x)
    changed = with_own_constants(jaxpr, makers_of(opened(jaxpr)), before)
    loop = loop_of(changed)
    constants, _, _ = loop.parts(changed.invars)
    assert loop_of(before).constants == 1 and not [each for each in constants if shape_of(each) == (16, 6, 4)]
    [mine] = run(_with(jaxpr, before, changed), [w, x])
    np.testing.assert_allclose(mine, fun(w, x), rtol=1e-6)


def test_loops_keep_constants_that_are_made_of_as_much():
    def fun(w, x, y):
        scaled = y * 2
        return jax.lax.scan(lambda c, w: (c * w + scaled, None), x, w)[0]

    jaxpr, before = _loop_of(fun, np.ones((3, 4)), np.ones((2, 4)), np.ones((2, 4)))
    assert with_own_constants(jaxpr, makers_of(opened(jaxpr)), before) is before


def _with(jaxpr, before, after):
    return replaced(jaxpr, eqns=[after if each is before else each for each in opened(jaxpr).eqns])
