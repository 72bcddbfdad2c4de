"""Specs of chips: errors for invalid and missing specs, and user-defined hardware."""

import dataclasses

import pytest

from scalax._core.mesh.gpu_topologies import GPU_KINDS
from scalax._planning.hardware.specs import find_hardware, required_specs
from scalax.errors import PlanError
from scalax.plan import HARDWARE, Hardware
from tests.support import ROOT

NUMBERS = [
    *('flops_per_second', 'hbm_bytes_per_second', 'hbm_bytes', 'ici_bytes_per_second', 'torus_axes'),
    *('ring_multiple', 'devices_per_chip', 'dcn_bytes_per_second', 'chips_per_host', 'hop_seconds'),
    'host_bytes_per_second',
]


# name -> specs without a source
MISSING = {
    'tpu7x': ['host_bytes_per_second'],
    **{name: ['ring_multiple'] for name in GPU_KINDS},  # they are not in a torus
    **{name: ['ring_multiple', 'dcn_bytes_per_second'] for name in ('h100-pcie', 'h100-nvl')},
    **{name: ['ring_multiple', 'host_bytes_per_second'] for name in ('gb200', 'gb300')},
}


@pytest.mark.parametrize('name', HARDWARE)
def test_unknown_specs_are_none(name):
    missing = [field for field in NUMBERS if getattr(HARDWARE[name], field) is None]
    assert missing == MISSING.get(name, [])


@pytest.mark.parametrize(
    ('name', 'share'), [('v4', 6.25e9), ('v5p', 6.25e9), ('v5e', 3.125e9), ('v6e', 12.5e9)]
)
def test_bytes_between_slices(name, share):
    """https://jax-ml.github.io/scaling-book/tpus, "TPU Specs", below the tables: per chip."""
    entry = HARDWARE[name]
    assert entry.dcn_bytes_per_second / entry.chips_per_host == share


@pytest.mark.parametrize(
    ('name', 'card'),
    [
        *(('a100', 200e9), ('h100', 400e9), ('gh200', 200e9), ('b200', 400e9)),
        *(('gb200', 400e9), ('gb300', 800e9)),
    ],
)
def test_bits_between_hosts(name, card):
    """One card per GPU."""
    entry = HARDWARE[name]
    assert 8 * entry.dcn_bytes_per_second / entry.chips_per_host == card


@pytest.mark.parametrize(
    ('name', 'reported'),
    [
        # `nvidia-smi` of one: https://github.com/modal-labs/modal-client/pull/2797
        ('h100', 81_559 * 2**20),
        # cudaGetDeviceProperties of one: https://github.com/pytorch/ao/pull/4002
        ('b200', 178.35 * 2**30),
    ],
)
def test_memory_of_data_sheets_is_less_than_drivers_report(name, reported):
    """Data sheets use gigabytes of 1e9 bytes; the rest is for drivers and libraries."""
    assert 0.9 < HARDWARE[name].hbm_bytes / reported < 0.97


@pytest.mark.parametrize(
    ('name', 'capacity'), [('v4', 32), ('v5p', 96), ('v5e', 16), ('v6e', 32), ('tpu7x', 192)]
)
def test_usable_memory_is_nearly_that_of_the_chip(name, capacity):
    entry = HARDWARE[name]
    assert 0.94 < entry.hbm_bytes * entry.devices_per_chip / (capacity * 2**30) < 1


def test_names_and_kinds():
    assert find_hardware(None, 'TPU v5').name == 'v5p'
    assert find_hardware(None, 'TPU v5 lite').name == 'v5e'
    assert find_hardware(None, 'NVIDIA H100 80GB HBM3').name == 'h100'
    assert find_hardware('v4', 'cpu').name == 'v4'
    hardware = Hardware('mine')
    assert find_hardware(hardware, 'cpu') is hardware
    kinds = [kind for entry in HARDWARE.values() for kind in entry.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_unknown_names():
    with pytest.raises(PlanError) as error:
        find_hardware('v5', 'cpu')
    assert str(error.value) == "there is no hardware 'v5' (did you mean 'v5p' or 'v5e'?)"
    with pytest.raises(PlanError) as error:
        find_hardware({'flops_per_second': 1e15}, 'cpu')
    assert str(error.value) == (
        "hardware is a scalax.plan.Hardware or the name of one, got {'flops_per_second': 1000000000000000.0}"
    )
    with pytest.raises(PlanError) as error:
        find_hardware(None, 'NVIDIA L4')
    assert str(error.value) == (
        "the specs of 'NVIDIA L4' devices are unknown: pass hardware=..., a scalax.plan.Hardware of "
        "your own or one of 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x', 'a100', 'h100', 'h100-pcie', 'h100-nvl', "
        "'h200', 'gh200', 'b200', 'gb200', 'gb300'"
    )


def test_missing_specs_are_named():
    with pytest.raises(PlanError) as error:
        required_specs(
            Hardware('mine'), 'name', 'flops_per_second', 'hbm_bytes', 'torus_axes', for_='a roofline'
        )
    assert str(error.value) == (
        "a roofline needs specs that the hardware 'mine' lacks: flops_per_second, hbm_bytes, "
        'torus_axes. Add them: dataclasses.replace(hardware, flops_per_second=..., hbm_bytes=..., '
        'torus_axes=...)'
    )


def test_invalid_specs_are_named():
    with pytest.raises(PlanError) as error:
        Hardware('mine', flops_per_second=0)
    assert str(error.value) == "the hardware 'mine' is invalid: flops_per_second is 0"
    with pytest.raises(PlanError, match='torus_axes is -1'):
        Hardware('mine', torus_axes=-1)
    assert Hardware('mine', torus_axes=0, ring_multiple=0, hop_seconds=0).torus_axes == 0


def test_entries_are_values():
    changed = dataclasses.replace(HARDWARE['v5p'], ici_bytes_per_second=8e10)
    assert changed != HARDWARE['v5p']
    assert changed == dataclasses.replace(HARDWARE['v5p'], ici_bytes_per_second=8e10)
    assert hash(changed) == hash(dataclasses.replace(HARDWARE['v5p'], ici_bytes_per_second=8e10))


OF_A_TORUS = {'ring_multiple', 'ring_needs_all'}
ALIKE = {'torus_axes': 0, 'devices_per_chip': 1, 'hop_seconds': 1e-6}
"""What is the same of all GPUs: the text above their table has it."""


@pytest.mark.parametrize(
    ('first', 'kinds', 'fields'),
    [
        ('v4', set(HARDWARE) - set(GPU_KINDS), {*NUMBERS, 'ring_needs_all', 'chip_bytes_per_second'}),
        ('h100', set(GPU_KINDS), {*NUMBERS, 'chips_per_slice', 'switches_add'} - OF_A_TORUS - {*ALIKE}),
    ],
    ids=['TPUs', 'GPUs'],
)
def test_the_tables_of_the_documentation(first, kinds, fields):
    lines = (ROOT / 'docs' / 'estimates.md').read_text(encoding='utf-8').splitlines()
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')]
    [names] = [row[1:-1] for row in rows if first in row[1:]]
    assert names == [name for name in HARDWARE if name in kinds]
    shown = {
        row[0].split('`')[1]: row[1:-1]
        for row in rows
        if row[0].startswith('`') and len(row) == len(names) + 2
    }
    assert set(shown) == fields
    for field, cells in shown.items():
        for name, cell in zip(names, cells, strict=True):
            value = getattr(HARDWARE[name], field)
            if field == 'hbm_bytes' and value is not None:
                value = round(value / 2**30, 2)
            expected = None if cell == '-' else cell == 'True' if isinstance(value, bool) else float(cell)
            assert expected == value, (field, name)


@pytest.mark.parametrize('kind', GPU_KINDS)
def test_shared_specs_of_gpus(kind):
    assert {field: getattr(HARDWARE[kind], field) for field in ALIKE} == ALIKE


@pytest.mark.parametrize(('kind', 'gpus'), GPU_KINDS.items())
def test_hosts_of_topologies_match_the_hardware(kind, gpus):
    entry = HARDWARE[kind]
    assert (entry.torus_axes, entry.chips_per_host) == (0, gpus.gpus_per_host)
    assert (entry.chips_per_slice or entry.chips_per_host) == gpus.gpus_per_domain
