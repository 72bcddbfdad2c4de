"""Groups of layers that stages exchange, and constants that are computed inside loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._jax.equations import loop_of, open_jaxpr, producers_of, shape_of
from scalax._jax.rewriting import eval_jaxpr, replace_jaxpr
from scalax._spmd.pipelines.layer_groups import _exchange_steps
from scalax._spmd.pipelines.sink_constants import sink_constants


@pytest.mark.parametrize('num_stages', range(2, 17))
def test_in_each_step_a_stage_sends_one_group_and_receives_one(num_stages):
    for num_repeats in range(2, 13):
        steps = [*_exchange_steps(num_stages, num_repeats)]
        for transfers in steps:
            owners = [transfer.owner for transfer in transfers]
            assert owners == [*range(num_stages)] == sorted(transfer.runner for transfer in transfers)
        groups = {
            (
                transfer.owner * num_repeats + transfer.stored_group,
                transfer.runner + transfer.repeat * num_stages,
            )
            for transfer in itertools.chain.from_iterable(steps)
        }
        assert groups == {(group, group) for group in range(num_stages * num_repeats)}


def _loop_of(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    [equation] = [candidate for candidate in jaxpr.eqns if candidate.primitive.name == 'scan']
    return jaxpr, equation


def test_loops_compute_masks_themselves():
    def fun(w, x):
        mask = jnp.broadcast_to((jnp.arange(6) < 3)[None, :, None], (16, 6, 4))
        return jax.lax.scan(lambda c, w: (jnp.tanh(jax.lax.select(mask, c, w * c)), None), x, w)[0]

    w, x = np.ones((3, 16, 6, 4), np.float32), np.ones((16, 6, 4), np.float32)
    jaxpr, before = _loop_of(fun, w, x)
    changed = sink_constants(jaxpr, producers_of(open_jaxpr(jaxpr)), before)
    loop = loop_of(changed)
    constants, _, _ = loop.split(changed.invars)
    assert loop_of(before).num_consts == 1 and not [
        constant for constant in constants if shape_of(constant) == (16, 6, 4)
    ]
    [result] = eval_jaxpr(_with(jaxpr, before, changed), [w, x])
    np.testing.assert_allclose(result, fun(w, x), rtol=1e-6)


def test_loops_keep_constants_computed_from_operands_of_their_size():
    def fun(w, x, y):
        scaled = y * 2
        return jax.lax.scan(lambda c, w: (c * w + scaled, None), x, w)[0]

    jaxpr, before = _loop_of(fun, np.ones((3, 4)), np.ones((2, 4)), np.ones((2, 4)))
    assert sink_constants(jaxpr, producers_of(open_jaxpr(jaxpr)), before) is before


def _with(jaxpr, before, after):
    return replace_jaxpr(
        jaxpr, eqns=[after if equation is before else equation for equation in open_jaxpr(jaxpr).eqns]
    )
