"""Plans of simulated devices that stand for GPUs: their numbers, their networks, and what is said of them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._plan.collective_seconds import collective_seconds
from scalax._plan.page import plan_blocks
from scalax._plan.torus import Place, networks_of, route_of, torus_of
from scalax._report import blocks
from scalax.plan import HARDWARE, Plan, find, search
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

H100 = HARDWARE['h100']
NOT_COMPILED = 'not compiled for h100: the program is that of cpu devices, with the numbers of h100'


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def plan_of(topology, dims, names, given, wanted, **options):
    helper = MeshShardingHelper.from_topology(topology, dims, names, **options)
    step = helper.sjit(lambda w, x: x @ w, in_shardings=given, out_shardings=wanted)
    return helper.plan(step, array(4096, 4096), array(4096, 4096))


GATHERED = plan_of('h100:2x4', [4, 2], ['fsdp', 'tp'], (P('fsdp', 'tp'), P('fsdp')), P('fsdp', 'tp'))
"""Each group of fsdp has two GPUs of each of two nodes, and gathers half of the weights: 16 MiB."""


def busy(kind, hardware, places, whole=1e9):
    """Seconds of a collective, by network."""
    route = route_of(places, torus_of(places, hardware), 'x')
    return collective_seconds(kind, whole, route, hardware, 1)


# --- Seconds --------------------------------------------------------------------------------------


def test_a_gather_over_nodes():
    """Two GPUs of each node share what comes from the other, and exchange it over NVLink."""
    roofline = GATHERED.roofline()
    assert roofline.hardware is H100
    assert roofline.parts['dcn:fsdp'] == pytest.approx(2**24 / 2 * (1 / 2) / 50e9)
    assert roofline.parts['ici:fsdp'] == pytest.approx(2**24 * (1 / 2) / 450e9)
    assert roofline.compute == pytest.approx(2 * 4096**3 / 8 / 989.5e12)
    assert roofline.bound == 'dcn:fsdp'
    [row] = GATHERED.collectives
    assert (row.kind, row.networks) == ('all-gather', ('ici', 'dcn'))


def test_a_gather_inside_of_nodes():
    plan = plan_of('h100:2x4', [2, 4], ['data', 'tp'], (P(None, 'tp'), P('data', 'tp')), P('data', 'tp'))
    assert {row.networks for row in plan.collectives} == {('ici',)}
    assert not any(name.startswith('dcn') for name in plan.roofline().parts)


def test_mesh_axes_over_nodes_are_as_asked():
    options = {'dcn_axis_dims': [1, 2]}
    given = P('fsdp', 'tp'), P('fsdp')
    plan = plan_of('h100:2x4', [4, 2], ['fsdp', 'tp'], given, P('fsdp', 'tp'), **options)
    [row] = plan.collectives
    assert row.networks == ('ici',)


def bus_bandwidth(kind, hardware, devices=8):
    """As nccl-tests define it: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md."""
    times = 2 if kind == 'all-reduce' else 1
    return times * 1e9 * (devices - 1) / devices / busy(kind, hardware, [Place(0)] * devices).ici


@pytest.mark.parametrize(
    ('kind', 'hardware', 'measured'),
    [
        # A maintainer: https://github.com/NVIDIA/nccl-tests/issues/212: "an effective NVLink bandwidth of
        # 370GB/s, which you can observe as BusBw when running non-allreduce operations".
        ('all-gather', H100, 370e9),
        ('all-reduce', H100, 370e9),  # NCCL_ALGO=RING, there
    ],
)
def test_measured_bus_bandwidth_is_below_that_of_the_roofline(kind, hardware, measured):
    assert 0.7 < measured / bus_bandwidth(kind, hardware) < 0.9


def test_switches_that_add_are_not_counted_on():
    """With NVLink SHARP an all-reduce is that much faster: 476 GB/s in
    https://github.com/NVIDIA/nccl-tests/issues/290, and the time of the roofline is none that nothing beats.
    """
    assert 1 < 476e9 / bus_bandwidth('all-reduce', H100) < 1.1


def test_measured_bandwidth_of_network_cards_is_below_that_of_the_roofline():
    """46 to 48 GB/s of a card of 400 Gb/s: https://github.com/NVIDIA/nccl-tests/issues/290."""
    share = 1e9 / 2 / busy('all-gather', H100, [Place(0), Place(1)]).dcn
    assert 0.9 < 46e9 / share < 48e9 / share < 1


# --- Hardware for any plan of simulated devices ---------------------------------------------------


def test_simulated_devices_fill_nodes_in_order():
    plan = MeshShardingHelper([8], ['x']).plan(
        MeshShardingHelper([8], ['x']).sjit(lambda w: w * 1, in_shardings=P('x'), out_shardings=P()),
        array(8, 1024, 1024),
    )
    of_one = plan.roofline('h100')
    of_two = plan.roofline(dataclasses.replace(H100, chips_per_host=4, dcn_bytes_per_second=2e11))
    of_any = plan.roofline(dataclasses.replace(H100, chips_per_host=None))
    assert of_one.parts == of_any.parts
    assert {*of_two.parts} - {*of_one.parts} == {'dcn:x'}
    assert not plan.simulates and not plan.not_compiled_for and plan.known_roofline is None
    assert of_one.not_compiled_for == NOT_COMPILED
    assert NOT_COMPILED in str(of_one)


def test_what_was_compiled_for():
    mine = dataclasses.replace(H100, name='mine', device_kinds=())
    assert 'not compiled for mine' in GATHERED.roofline(mine).not_compiled_for
    for_it = dataclasses.replace(GATHERED, device_kind='NVIDIA H100 80GB HBM3', platform='gpu', simulates='')
    assert for_it.roofline().not_compiled_for == ''
    assert for_it.known_roofline.parts == GATHERED.roofline().parts
    assert for_it.roofline(mine).not_compiled_for


def test_compilers_for_gpus_refuse_nothing():
    """So that memory is compared with that of the GPU also where it is no estimate."""
    memory = dataclasses.replace(GATHERED.memory, estimated=False)
    compiled = dataclasses.replace(GATHERED, platform='gpu', simulates='', memory=memory)
    assert compiled.fits is True
    memory = dataclasses.replace(memory, temporaries=10**11)
    assert dataclasses.replace(compiled, memory=memory).fits is False
    assert dataclasses.replace(compiled, memory=dataclasses.replace(memory, limit=None)).fits is None


def test_networks_of_nodes():
    places = [Place(i // 2) for i in range(4)]
    rows = [[0, 1]], [[0, 2]], [[0, 1, 2, 3]]
    found = [networks_of(np.array(row), places, switched=True) for row in rows]
    assert found == [('ici',), ('dcn',), ('ici', 'dcn')]
    assert networks_of(np.array([[0, 2]]), places) == ()


# --- Texts and files ------------------------------------------------------------------------------


def test_the_text(snapshot):
    # Each XLA for CPUs has its own.
    memory = dataclasses.replace(GATHERED.memory, temporaries=3 * 2**24, peak=2**26)
    text = dataclasses.replace(GATHERED, memory=memory).to_text(100)
    snapshot(re.sub(r'test_gpus.py:\d+', 'test_gpus.py:N', text))


def test_memory_is_that_of_the_gpu():
    assert GATHERED.memory.limit == 80e9
    assert GATHERED.fits
    assert 'an estimate' in str(GATHERED)
    large = dataclasses.replace(GATHERED, memory=dataclasses.replace(GATHERED.memory, temporaries=10**11))
    assert large.fits is False


def test_the_property():
    assert (GATHERED.simulates, GATHERED.not_compiled_for) == ('h100', NOT_COMPILED)
    assert GATHERED.hardware is H100
    assert dataclasses.replace(GATHERED, simulates='').hardware is None
    assert GATHERED.known_roofline.not_compiled_for == NOT_COMPILED


def test_a_page_says_it():
    page = blocks.html(plan_blocks(GATHERED, 'A plan'))
    assert page.count(NOT_COMPILED) == 1
    assert 'the memory of a device, by an estimate' in page and 'No seconds' not in page


def test_json_keeps_it():
    again = Plan.load(GATHERED.to_json())
    assert again == GATHERED
    assert again.not_compiled_for == NOT_COMPILED


def test_a_diff_names_it():
    other = dataclasses.replace(GATHERED, simulates='')
    assert '8 h100' in str(GATHERED.diff(other))


# --- Searches -------------------------------------------------------------------------------------


def make_step(helper):
    step = helper.sjit(lambda w, x: x @ w, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp'))
    return step, (array(1024, 1024),) * 2


def test_a_search():
    found = search(make_step, 'h100:2x4', ['fsdp', 'tp'], constraints={'tp': [1, 2, 4]}, show_progress=False)
    assert found.fits and all(each.plan.simulates == 'h100' for each in found.candidates)
    assert found.not_compiled_for == NOT_COMPILED
    assert NOT_COMPILED in str(found) and NOT_COMPILED in found._repr_html_()
    assert 'in full' not in str(found)


def test_a_search_with_an_axis_over_nodes():
    found = search(
        make_step,
        'h100:4',
        ['fsdp', 'tp'],
        num_slices=2,
        dcn_axis='fsdp',
        constraints={'tp': 4},
        show_progress=False,
    )
    assert {place.slice for place in found.best.places} == {0, 1}


def test_find():
    found = find(
        lambda w, x: x @ w,
        (array(1024, 1024), array(1024, 1024)),
        'h200:8',
        batch_argnums=1,
        show_progress=False,
    )
    assert found.plan.simulates == 'h200'
    assert found.fits is True  # the memory of the GPU is known
    assert found.plan.not_compiled_for in str(found)
    assert "'h200:8'" in found.to_code()
