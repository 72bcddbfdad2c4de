"""Limits that a plan has to keep."""

import dataclasses

import jax.numpy as jnp
import pytest

from scalax.errors import ArgumentError, PlanError
from scalax.plan import Buffer, Memory, Source
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
KIB = 2**10


@pytest.fixture(scope='module')
def plan():
    """A sum along fsdp of 8 KiB, and nothing along tp."""

    def gradient(w, x):
        return (x.T @ (x @ w)) * jnp.float32(2)

    step = HELPER.sjit(gradient, in_shardings=(P(), P('fsdp')), out_shardings=P())
    return HELPER.plan(step, leaf(64, 32), leaf(16, 64))


def test_limits_that_are_kept(plan):
    plan.check()
    plan.check(peak=plan.memory.peak, bytes={'fsdp': 8 * KIB, 'tp': 0, ('fsdp', 'tp'): 0})
    plan.check(bytes={('fsdp',): 1e9, ('tp', 'fsdp'): 0})
    on_tpu = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, limit=2**30))
    on_tpu.check(fits=True)


def test_all_that_are_exceeded_are_named(plan, snapshot):
    held = {'arguments': 0, 'outputs': 0, 'temporaries': 3 * KIB, 'peak': 3 * KIB}
    memory = dataclasses.replace(plan.memory, limit=KIB, **held)
    large = dataclasses.replace(plan, memory=memory)
    with snapshot.raises(AssertionError):
        large.check(fits=True, peak=2 * KIB, bytes={'fsdp': KIB, 'tp': 0})


def test_what_does_not_fit_is_shown_with_what_is_held(plan, snapshot):
    memory = Memory(4 * KIB, 0, 6 * KIB, estimated=False, peak=8 * KIB, limit=9 * KIB)
    held = (Buffer(4 * KIB, 'f32[32,32]', Source(operand='w')), Buffer(4 * KIB, 'f32[512]', Source(), 2))
    large = dataclasses.replace(plan, memory=memory, buffers=held, refusal='too large')
    with snapshot.raises(AssertionError):
        large.check(fits=True, bytes={'fsdp': 8 * KIB})


def test_the_time_of_a_step(plan, snapshot):
    with pytest.raises(PlanError, match='hardware'):
        plan.check(seconds=1)
    on_chips = dataclasses.replace(plan, device_kind='TPU v5e', collectives=(), memory=Memory(KIB, 0, 0))
    on_chips.check(seconds=1)
    with snapshot.raises(AssertionError):
        on_chips.check(seconds=0)


def test_whether_it_fits_is_not_known(plan):
    with pytest.raises(AssertionError, match='it is not known to fit'):
        plan.check(fits=True)


@pytest.mark.parametrize('axes', ['fsdb', ('fsdb', 'tp')])
def test_an_axis_that_the_mesh_does_not_have(plan, axes):
    with pytest.raises(ArgumentError, match=r"the mesh has no axis 'fsdb' .*'fsdp'"):
        plan.check(bytes={axes: 1})


def test_what_is_no_number_is_not_kept(plan):
    with pytest.raises(AssertionError, match='at most nan'):
        plan.check(peak=float('nan'))
