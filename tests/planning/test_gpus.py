"""Plans for GPUs: recorded programs, memory, networks and times.

The programs are recorded, and compiled again if the compiler is installed.
"""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._core.mesh.gpu_targets import TARGETS
from scalax._core.render import blocks
from scalax._planning.cost.collectives import collective_times, collectives
from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.hardware.torus import DevicePosition, Route, networks_of, route_of, torus_of
from scalax._planning.program.hlo import parse
from scalax._planning.report.plan_page import plan_blocks
from scalax._planning.time.collective_time import collective_seconds
from scalax._planning.time.nccl import nccl_seconds
from scalax.plan import HARDWARE, Exactness, Plan, Source, autoshard, search
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import executable_reader, gpu_compiler
from tests.support.gpu_programs import PROGRAMS, made_plan, recorded_plan
from tests.support.recorded import gpu_names, recorded

H100 = HARDWARE['h100']
NOT_COMPILED = 'not compiled for h100: this is the program for cpu devices, timed with the specs of h100'


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def busy(kind, hardware, positions, size=1e9):
    """Returns the seconds of a collective, by network."""
    route = route_of(positions, torus_of(positions, hardware), 'x')
    return collective_seconds(kind, size, route, hardware, 1)


@pytest.fixture
def gathered():
    return recorded_plan('product h100')


# --- Programs ---------------------------------------------------------------------------------------


def test_all_programs_are_recorded():
    assert gpu_names() == sorted(PROGRAMS)
    for name, program in PROGRAMS.items():
        recording = recorded(name)
        assert (recording.topology, recording.mesh, recording.slices) == (
            program.topology,
            program.mesh,
            program.slices,
        )


@pytest.mark.medium
@pytest.mark.parametrize('name', PROGRAMS)
def test_both_readers_count_the_same(name):
    """Collectives, FLOPs and host transfers are equal, and HBM bytes at most those of all arrays."""
    recording, plan = recorded(name), recorded_plan(name)
    second = executable_reader.read(recording.executable, recording.mesh, recording.slices)
    totals = {}
    for row in plan.collectives:
        count, size = totals.get((row.kind, row.axes), (0, 0))
        totals[row.kind, row.axes] = count + row.count, size + row.count * row.bytes
    assert totals == second.collectives
    moves = plan.host_transfers.to_host, plan.host_transfers.from_host
    assert (plan.device_cost.flops, *moves) == (second.flops, second.to_host, second.from_host)
    assert 0 < plan.device_cost.bytes <= second.hbm


@pytest.mark.medium
@pytest.mark.parametrize('name', PROGRAMS)
def test_collectives_have_causes(name):
    """All except scalars have an origin in the partitioner's program, even if several are combined."""
    plan = recorded_plan(name)
    assert not [row for row in plan.collectives if row.cause == 'compiler' and row.bytes > 4]
    assert all(row.source.file or row.source.operand for row in plan.collectives if row.bytes > 4)


# The factor by which devices duplicate computations.
REPEATED = dict.fromkeys(('zero_1 h100', 'nested_loops h100', 'branches h100', 'accumulated h100'), 2)
ABOUT = {
    'stencil h100': 2.0052,  # edges that both neighbours compute
    'convolutions h100': 1.0177,  # zero padding of uneven shards
    'vision h100': 1.0020,  # 196 patches are padded to 200, for the tensor cores
    'experts h100': 0.9998,  # matmuls with unused results
    'rings h100': 0.9821,
    **dict.fromkeys(('by_hand h100', 'resharded h100', 'rolled h100'), 0),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', PROGRAMS)
def test_flops_match_the_function(name):
    plan = recorded_plan(name)
    assert plan.device_cost.kernels == 0
    if name in ABOUT:
        assert plan.device_cost.flops * plan.devices == pytest.approx(ABOUT[name] * plan.flops, rel=1e-4)
    else:
        assert plan.device_cost.flops * plan.devices == REPEATED.get(name, 1) * plan.flops


@pytest.mark.parametrize('name', PROGRAMS)
def test_memory_is_the_compilers_own(name):
    stats, memory = recorded(name).memory, recorded_plan(name).memory
    assert memory.arguments == stats['argument_size_in_bytes']
    assert memory.donated == stats['alias_size_in_bytes']
    total = sum(stats[f'{part}_size_in_bytes'] for part in ('argument', 'output', 'temp')) - memory.donated
    assert memory.total == pytest.approx(total, abs=4096)
    host = ('host_argument', 'host_output', 'host_temp')
    held = sum(stats[f'{part}_size_in_bytes'] for part in host) - stats['host_alias_size_in_bytes']
    assert memory.host == held
    # XLA counts arguments in host memory, too.
    peak = stats['peak_memory_in_bytes'] - stats['host_argument_size_in_bytes']
    assert memory.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.medium
@pytest.mark.parametrize('name', PROGRAMS)
def test_buffers_at_the_peak_have_sources(name):
    plan = recorded_plan(name)
    assert 0.99 * plan.memory.peak <= sum(row.bytes for row in plan.buffers) <= plan.memory.peak
    named = sum(row.bytes for row in plan.buffers if row.source._replace(annotation='') != Source())
    # A copy of a gathered weight has no name.
    assert named >= (0.7 if name == 'gathered h100' else 0.9) * plan.memory.peak


@pytest.mark.slow
@gpu_compiler.needed
@pytest.mark.parametrize('name', ['product h100', 'fsdp h100', 'stencil h100', 'offloaded h100'])
def test_the_recordings_match_the_compiler(name):
    if recorded(name).versions['jax'] != jax.__version__:
        pytest.skip('each compiler has its own memory')
    new, recorded_before = made_plan(name), recorded_plan(name)
    for field in (
        'memory',
        'flags',
        'device_positions',
        'device_kind',
        'platform',
        'host_transfers',
        'flops',
    ):
        assert getattr(new, field) == getattr(recorded_before, field), field
    assert new.collectives == recorded_before.collectives
    assert new.device_cost == recorded_before.device_cost
    assert new.buffers == recorded_before.buffers


MINE = {'xla_gpu_enable_triton_gemm': True, 'xla_gpu_all_gather_combine_threshold_bytes': 123}
AUTOTUNE, COMBINE = '--xla_gpu_autotune_level=0', '--xla_gpu_all_gather_combine_threshold_bytes=123'
CUBLAS = AUTOTUNE, '--xla_gpu_enable_triton_gemm=false'


@pytest.mark.medium
@gpu_compiler.needed
@pytest.mark.parametrize(
    ('made_by', 'options', 'flags'),
    [
        ('plan', None, CUBLAS),
        ('jit', None, CUBLAS),
        ('jit', MINE, (COMBINE, AUTOTUNE)),
        ('sjit', MINE, (COMBINE, AUTOTUNE)),
        ('sjit', {'xla_gpu_autotune_level': 2}, ('--xla_gpu_autotune_level=2', CUBLAS[1])),
    ],
)
def test_options_of_a_function_are_in_force(made_by, options, flags):
    helper = MeshShardingHelper.from_topology('h100:1', [1], ['x'])
    where = jax.sharding.NamedSharding(helper.mesh, P())

    def product(x):
        return jax.lax.with_sharding_constraint(x @ x, where)

    step = {
        'plan': lambda: product,
        'jit': lambda: jax.jit(product, compiler_options=options),
        'sjit': lambda: helper.sjit(product, compiler_options=options),
    }[made_by]()
    plan = helper.plan(step, array(1024, 1024))
    assert plan.flags == flags
    assert bool(plan.memory.temporaries) == (CUBLAS[1] in flags)  # the scratch space of cuBLAS


@pytest.mark.slow
@gpu_compiler.needed
@pytest.mark.parametrize('in_a_file', [False, True])
def test_xla_flags_are_in_force(tmp_path, in_a_file):
    """XLA reads the variable once, when it starts: options, or the name of a file with options."""
    program = """
import jax
from scalax.sharding import MeshShardingHelper, PartitionSpec
helper = MeshShardingHelper.from_topology('h100:1', [1], ['x'])
step = helper.sjit(lambda x: x @ x, in_shardings=PartitionSpec())
print(helper.plan(step, jax.ShapeDtypeStruct((256, 256), 'bfloat16')).flags)
"""
    others = '--xla_gpu_enable_command_buffer=CUBLAS,FUSION', '--xla_allow_excess_precision=false'
    flags = ' '.join(['--xla_gpu_enable_triton_gemm=true', *others])
    (tmp_path / 'flags').write_text(flags, encoding='utf-8')
    env = {**os.environ, 'XLA_FLAGS': str(tmp_path / 'flags') if in_a_file else flags}
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.strip() == str((AUTOTUNE, *others))


@pytest.mark.medium
@gpu_compiler.needed
@pytest.mark.parametrize(('kind', 'modelled'), [('a100', False), ('h100', True), ('b200', True)])
def test_gpus_without_kernel_models_are_planned_without_a_schedule(kind, modelled):
    helper = MeshShardingHelper.from_topology(f'{kind}:2', [2], ['x'])
    step = helper.sjit(lambda x: jnp.tanh(x @ x), in_shardings=P('x'), out_shardings=P('x'))
    plan = helper.plan(step, array(4096, 4096))
    assert (plan.schedule is not None) is modelled
    assert plan.flags == CUBLAS
    assert plan.device_cost.flops == 4096**3


@gpu_compiler.needed
def test_a_program_that_does_not_fit():
    """The compiler compiles it anyway."""
    helper = MeshShardingHelper.from_topology('h100:8', [8], ['x'])
    step = helper.sjit(lambda x: x * 2, in_shardings=P(None), out_shardings=P(None))
    plan = helper.plan(step, array(2**18, 2**17))
    assert (plan.fits, plan.refusal, plan.memory.arguments) == (False, '', 2**36)


@pytest.mark.medium
@gpu_compiler.needed
def test_a_matmul_of_other_types():
    helper = MeshShardingHelper.from_topology('h100:1', [1], ['x'])
    for dtype in ('float32', 'float8_e4m3fn', 'int8', 'complex64'):
        operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((512, 256), (256, 1024))]
        step = helper.sjit(jnp.matmul, in_shardings=P(), out_shardings=P())
        plan = helper.plan(step, *operands)
        assert (
            plan.device_cost.flops == plan.flops == (8 if dtype == 'complex64' else 2) * 512 * 256 * 1024
        ), dtype


@pytest.mark.parametrize(('space', 'moved'), [(0, 2), (1, 2), (2, 2), (5, 1)])
def test_all_memory_except_host_memory_is_device_memory(space, moved):
    text = f"""HloModule made, is_scheduled=true

ENTRY %main (x: f32[256]) -> f32[256] {{
  %x = f32[256]{{0:S({space})}} parameter(0)
  ROOT %r = f32[256]{{0}} negate(%x)
}}
"""
    assert device_cost_of(parse(text, one_memory=True)).bytes == moved * 4 * 256


GRADIENT = """HloModule made, is_scheduled=true

ENTRY %main (x: bf16[8,64,64,128], g: bf16[8,64,64,256]) -> bf16[256,3,3,128] {
  %x = bf16[8,64,64,128] parameter(0)
  %g = bf16[8,64,64,256] parameter(1)
  %w = (bf16[256,3,3,128], u8[0]) custom-call(%x, %g), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  ROOT %r = bf16[256,3,3,128] get-tuple-element(%w), index=0
}
"""


def test_the_gradient_of_a_convolution():
    """The window positions inside the image: 3 x 64 - 2 along each side."""
    assert device_cost_of(parse(GRADIENT)).flops == 2 * 8 * 256 * 128 * (3 * 64 - 2) ** 2


def attention(name='Softmax', mask='NO_MASK', window=0, packed=1, queries=6, keys=8):
    """A cuDNN call as JAX writes it: three heads of size 16, with values of size 32."""
    shape = f'{{"element_type": "BF16", "dimensions": ["2", "3", "{queries}", "{keys}"], "tuple_shapes": []}}'
    config = (
        f'{{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {shape}, "mask_type": "{mask}", '
        f'"sliding_window_length": {window}, "max_seg_per_batch": {packed}, "is_paged_attention": false}}}}'
    )
    return f"""HloModule made, is_scheduled=true

ENTRY %main (q: bf16[2,{queries},3,16], k: bf16[2,{keys},3,16], v: bf16[2,{keys},3,32]) -> bf16[2] {{
  %q = bf16[2,{queries},3,16] parameter(0)
  %k = bf16[2,{keys},3,16] parameter(1)
  %v = bf16[2,{keys},3,32] parameter(2)
  %a = (bf16[2], u8[0]) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmha{name}", \
backend_config={config}
  ROOT %r = bf16[2] get-tuple-element(%a), index=0
}}
"""


@pytest.mark.parametrize(
    ('options', 'pairs'),
    [
        ({}, np.ones((6, 8))),
        ({'name': 'ScaleBiasSoftmax'}, np.ones((6, 8))),
        ({'mask': 'CAUSAL'}, np.tri(6, 8)),
        ({'mask': 'CAUSAL', 'queries': 8, 'keys': 6}, np.tri(8, 6)),
        ({'mask': 'CAUSAL', 'window': 3}, np.tri(6, 8) - np.tri(6, 8, -3)),
        ({'mask': 'CAUSAL', 'window': 1}, np.eye(6, 8)),
    ],
)
def test_attention_of_cudnn(options, pairs):
    """Two matmuls forward (scores, values), five backward (the scores and four gradients)."""
    forward = device_cost_of(parse(attention(**options)))
    backward = device_cost_of(
        parse(attention(**{**options, 'name': f'{options.get("name", "Softmax")}Backward'}))
    )
    pair_flops = 2 * 2 * 3 * int(pairs.sum())
    assert (forward.flops, backward.flops) == (pair_flops * (16 + 32), pair_flops * (3 * 16 + 2 * 32))
    assert {(work.exactness, work.kernels) for work in (forward, backward)} == {(Exactness.EXACT, 0)}


@pytest.mark.parametrize('options', [{'mask': 'PADDING'}, {'mask': 'PADDING_CAUSAL'}, {'packed': 2}])
def test_attention_with_dynamic_lengths_counts_at_most_full_rows(options):
    work = device_cost_of(parse(attention(**options)))
    pairs = np.tri(6, 8) if 'CAUSAL' in options.get('mask', '') else np.ones((6, 8))
    assert (work.flops, work.exactness) == (2 * 2 * 3 * int(pairs.sum()) * (16 + 32), Exactness.AT_MOST)


# --- Seconds --------------------------------------------------------------------------------------


def test_a_gather_over_hosts(gathered):
    """Two GPUs of each host share the data from the other host, and exchange it over NVLink."""
    roofline = gathered.roofline()
    assert roofline.hardware is H100
    assert roofline.parts['dcn:fsdp'] == pytest.approx(2**24 / 2 * (1 / 2) / 50e9)
    assert roofline.parts['ici:fsdp'] == pytest.approx(2**24 * (1 / 2) / 450e9)
    assert roofline.compute == pytest.approx(2 * 4096**3 / 8 / 989.5e12)
    assert roofline.bottleneck == 'dcn:fsdp'
    [row] = gathered.collectives
    assert (row.kind, row.networks) == ('all-gather', ('ici', 'dcn'))


def test_networks_of_mesh_axes():
    assert recorded_plan('fsdp_tp h100').networks == {('fsdp',): ('ici', 'dcn'), ('tp',): ('ici',)}
    inside = recorded_plan('decoder gb200')
    assert {row.networks for row in inside.collectives} == {('ici',)}  # eight GPUs in two hosts of one rack
    assert not any(name.startswith('dcn') for name in inside.roofline().parts)


def bus_bandwidth(kind, hardware, devices=8):
    """Returns nccl-tests' bus bandwidth: github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md."""
    times = 2 if kind == 'all-reduce' else 1
    return times * 1e9 * (devices - 1) / devices / busy(kind, hardware, [DevicePosition(0)] * devices).ici


@pytest.mark.parametrize('kind', ['all-gather', 'all-reduce'])
def test_measured_bus_bandwidth_is_below_that_of_the_roofline(kind):
    """A maintainer, https://github.com/NVIDIA/nccl-tests/issues/212: "an effective NVLink bandwidth of
    370GB/s, which you can observe as BusBw when running non-allreduce operations"; others by NCCL_ALGO=RING.
    """
    without = dataclasses.replace(H100, switches_add=False)
    assert 0.7 < 370e9 / bus_bandwidth(kind, without) < 0.9


def by_nccl(kind, size, name, devices=8, domains=1, card=None):
    """Returns the bus bandwidth that NCCL predicts."""
    route = Route(domains, devices, devices, ())
    seconds = nccl_seconds(kind, size, route, TARGETS[name], card, HARDWARE[name].switches_add)
    times = 2 if kind == 'all-reduce' else 1
    return times * size * (route.size - 1) / route.size / seconds


def permutes(inside, between):
    """A program that permutes along two lists of pairs, on two hosts of four GPUs."""
    lines = [
        f'%{name} = f32[250] collective-permute(%x), source_target_pairs={{{pairs}}}'
        for name, pairs in (('in', inside), ('out', between))
    ]
    return parse(f"""HloModule made, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[250]) -> (f32[250], f32[250]) {{
  %x = f32[250] parameter(0)
  {lines[0]}
  {lines[1]}
  ROOT %both = (f32[250], f32[250]) tuple(%in, %out)
}}
""")


INSIDE, BETWEEN = '{0,1},{2,3},{4,5},{6,7}', '{0,4},{1,5},{2,6},{3,7}'
TWO_HOSTS = {'x': 8}, [DevicePosition(i // 4) for i in range(8)]


def test_a_permute_between_hosts_is_not_a_part_of_one_inside_them():
    """In contrast to programs for TPUs, which split one permute into these two parts."""
    program, ids = permutes(INSIDE, BETWEEN), range(8)
    rows = collectives(program, *TWO_HOSTS, None, ids, switched=True)
    assert {(row.networks, row.crossing, row.count) for row in rows} == {(('ici',), 0, 1), (('dcn',), 4, 1)}
    times = collective_times(lambda rows: [1.0 + row.crossing for row in rows], program, *TWO_HOSTS, ids)
    assert {name: seconds for (_, name), (_, seconds) in times.items()} == {'in': 1.0, 'out': 5.0}


@pytest.mark.parametrize(
    ('inside', 'between', 'count'),
    [
        ('{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}', '{3,4},{7,0}', 1),
        ('{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}', BETWEEN, 2),
    ],
    ids=['the parts of a ring', 'each device sends twice'],
)
def test_permutes_of_slices_are_one_where_each_device_sends_once(inside, between, count):
    positions = [DevicePosition(i // 4, (i % 4, 0, 0)) for i in range(8)]
    rows = collectives(permutes(inside, between), {'x': 8}, positions, None, range(8))
    assert len(rows) == sum(row.count for row in rows) == count


@pytest.mark.parametrize('opcodes', [('all-gather',) * 2, ('all-gather-start', 'all-gather-done')])
def test_collectives_of_each_branch_have_their_seconds(opcodes):
    """The table has the branch that sends most; another branch may take longer in the schedule."""
    start, end = opcodes
    groups = 'replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}'
    types = ('f32[1000]', '(f32[250], f32[1000])')
    begun = f'%some = {types[start != end]} {start}(%p), {groups}'
    if start != end:
        begun += f'\n  %end = f32[1000] {end}(%some)'
    program = parse(f"""HloModule made, is_scheduled=true, num_partitions=8

%less (p: f32[250]) -> f32[250] {{
  %p = f32[250] parameter(0)
  {begun}
  ROOT %part = f32[250] slice(%{'some' if start == end else 'end'}), slice={{[0:250]}}
}}

%more (p: f32[250]) -> f32[250] {{
  %p = f32[250] parameter(0)
  ROOT %moved = f32[250] all-to-all(%p), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}
}}

ENTRY %main (x: f32[250], b: pred[]) -> f32[250] {{
  %x = f32[250] parameter(0)
  %b = pred[] parameter(1)
  ROOT %z = f32[250] conditional(%b, %x, %x), true_computation=%less, false_computation=%more
}}
""")
    assert len(collectives(program, *TWO_HOSTS, None, range(8), switched=True)) == 1
    times = collective_times(lambda rows: [row.group for row in rows], program, *TWO_HOSTS, range(8))
    assert times == {('less', 'some'): ('all-gather', 4), ('more', 'moved'): ('all-to-all', 8)}


def test_reducing_switches():
    """476 GB/s for an all-reduce, https://github.com/NVIDIA/nccl-tests/issues/290: faster than a ring."""
    assert 450e9 < 476e9 < bus_bandwidth('all-reduce', H100) == pytest.approx(450e9 * 2 * 7 / 9)
    assert by_nccl('all-reduce', 2**33, 'h100') == pytest.approx(476e9, rel=0.01)
    assert by_nccl('all-gather', 2**33, 'h100') == pytest.approx(370e9, rel=0.01)
    assert by_nccl('all-reduce', 2**33, 'a100') == pytest.approx(12 * 20e9, rel=0.01)  # no reducing switches
    assert [name for name, chip in HARDWARE.items() if chip.switches_add] == [
        *('h100', 'h200', 'b200', 'gb200', 'gb300')
    ]


def test_two_devices_do_not_gain_from_reducing_switches():
    positions = [DevicePosition(0)] * 2
    assert busy('all-reduce', H100, positions) == busy(
        'all-reduce', dataclasses.replace(H100, switches_add=False), positions
    )


@pytest.mark.parametrize('kind', ['all-gather', 'reduce-scatter', 'all-reduce'])
@pytest.mark.parametrize('domains', [1, 2, 64])
@pytest.mark.parametrize('devices', [1, 2, 8])
def test_nccl_expects_no_less_than_the_roofline(kind, domains, devices):
    positions = [DevicePosition(i // devices) for i in range(domains * devices)]
    if len(positions) == 1:
        return
    route = route_of(positions, torus_of(positions, H100), 'x')
    for size in (2**10, 2**20, 2**26, 2**34):
        least = max(collective_seconds(kind, size, route, H100, 1))
        expected = nccl_seconds(kind, size, route, TARGETS['h100'], 5e10, True)
        assert least < expected
        assert expected < 2.1 * least or size < 2**34  # a ring through two hosts sends twice the bytes


@pytest.mark.parametrize(
    ('name', 'devices', 'bandwidth'),
    [('h100', 8, 40e9 * 0.85), ('b200', 8, 80e9 * 0.74), ('b200', 2, None), ('h100', 4, None)],
)
def test_channels_of_reducing_switches(name, devices, bandwidth):
    """A device sends twice over its channel: 9 times 40 GB/s are less than 371. Few devices use rings."""
    size, target = 2.0**33, TARGETS[name]
    links = target.links * {9: 20.6e9, 10: 40.1e9}[target.capability[0]]
    rate = devices * bandwidth if bandwidth else links * devices / (devices - 1) / 2
    route = Route(1, devices, devices, ())
    assert size / nccl_seconds('all-reduce', size, route, target, None, True) == pytest.approx(rate, 0.01)


def test_kilobytes_between_hosts_do_not_use_the_protocol_for_the_smallest_arrays():
    """LL reaches 20.4 GB/s through host memory, and LL128 nine tenths of the rate of eight cards."""
    hosts = Route(4, 8, 32, ())
    seconds = [
        nccl_seconds('all-gather', size, hosts, TARGETS['h100'], 5e10, True) for size in (2**16, 2**22)
    ]
    steps = 28, 3
    of_ll, of_ll128 = (
        begin + steps[0] * inside + steps[1] * between + size * 31 / 32 / rate
        for begin, inside, between, size, rate in (
            (6.6e-6, 0.6e-6, 2.7e-6, 2**16, 20.4e9),
            (14e-6, 1.9e-6, 4e-6, 2**22, 0.92 * 18 * 20.6e9),
        )
    )
    assert seconds == pytest.approx([of_ll, of_ll128])


def test_trees_reach_half_of_their_bandwidth_with_one_megabyte():
    """Half of it at 1 MiB on eight hosts, with protocol LL128: 120 of 128 bytes are data."""
    seconds = nccl_seconds('all-reduce', 2**20, Route(64, 1, 64, ()), TARGETS['h100'], 5e10, True)
    assert seconds == pytest.approx(14e-6 + 12 * 8.5e-6 + 2**21 / (5e10 * 0.92 * 15 / 16 * 0.6))


def test_small_all_reduces_use_trees_and_large_ones_use_rings():
    """On 64 hosts a tree has six levels, and a ring has 63 steps."""
    small = {kind: 8 / by_nccl(kind, 8.0, 'h100', 1, 64, 5e10) for kind in ('all-gather', 'all-reduce')}
    assert small['all-reduce'] < small['all-gather']
    assert by_nccl('all-reduce', 2**34, 'h100', 1, 64, 5e10) == pytest.approx(50e9, rel=0.02)


def test_all_to_alls_and_permutes_are_not_rings():
    route = Route(1, 8, 8, ())
    for kind in ('all-to-all', 'collective-permute', 'ragged-all-to-all'):
        assert nccl_seconds(kind, 1e9, route, TARGETS['h100'], None, True) is None


def test_measured_bandwidth_of_network_cards_is_below_that_of_the_roofline():
    """46 to 48 GB/s on a card of 400 Gb/s: https://github.com/NVIDIA/nccl-tests/issues/290."""
    share = 1e9 / 2 / busy('all-gather', H100, [DevicePosition(0), DevicePosition(1)]).dcn
    assert 0.9 < 46e9 / share < 48e9 / share < 1


def test_networks_of_hosts():
    positions = [DevicePosition(i // 2) for i in range(4)]
    rows = [[0, 1]], [[0, 2]], [[0, 1, 2, 3]]
    networks = [networks_of(np.array(row), positions, switched=True) for row in rows]
    assert networks == [('ici',), ('dcn',), ('ici', 'dcn')]
    assert networks_of(np.array([[0, 2]]), positions) == ()


# --- GPU specs for programs of simulated devices ----------------------------------------------------


def test_simulated_devices_fill_hosts_in_order():
    plan = MeshShardingHelper([8], ['x']).plan(
        MeshShardingHelper([8], ['x']).sjit(lambda w: w * 1, in_shardings=P('x'), out_shardings=P()),
        array(8, 1024, 1024),
    )
    of_one = plan.roofline('h100')
    of_two = plan.roofline(dataclasses.replace(H100, chips_per_host=4, dcn_bytes_per_second=2e11))
    of_any = plan.roofline(dataclasses.replace(H100, chips_per_host=None))
    of_rack = plan.roofline('gb200')
    assert of_one.parts == of_any.parts
    assert {*of_two.parts} - {*of_one.parts} == {'dcn:x'}
    assert {*of_rack.parts} == {*of_one.parts}
    assert plan.known_roofline is None
    assert of_one.not_compiled_for == NOT_COMPILED
    assert NOT_COMPILED in str(of_one)


def test_note_about_other_hardware(gathered):
    hardware = dataclasses.replace(H100, name='mine', device_kinds=())
    assert gathered.roofline().not_compiled_for == ''
    assert gathered.known_roofline == gathered.roofline()
    assert 'not compiled for mine' in gathered.roofline(hardware).not_compiled_for


def test_gpu_compilers_never_report_out_of_memory(gathered):
    """Therefore the plan compares memory with the GPU's."""
    assert gathered.memory.limit == 80e9
    assert gathered.fits is True
    memory = dataclasses.replace(gathered.memory, temporaries=10**11)
    assert dataclasses.replace(gathered, memory=memory).fits is False
    assert dataclasses.replace(gathered, memory=dataclasses.replace(memory, limit=None)).fits is None


def test_memory_fraction_above_the_default(gathered):
    for size, message in (
        (59e9, ''),
        (73.9e9, 'XLA_PYTHON_CLIENT_MEM_FRACTION=0.93'),
        (81e9, 'does NOT fit'),
    ):
        memory = dataclasses.replace(gathered.memory, temporaries=int(size), peak=0)
        text = str(dataclasses.replace(gathered, memory=memory))
        assert message in text and ('MEM_FRACTION' in text) == ('MEM_FRACTION' in message)


# --- Texts and files ------------------------------------------------------------------------------


def test_the_text(gathered, snapshot):
    snapshot(re.sub(r'(\w+).py:\d+', r'\1.py:N', gathered.to_text(100)))


def test_a_page(gathered):
    page = blocks.html(plan_blocks(gathered, 'A plan'))
    assert 'the memory of a device' in page and 'No seconds' not in page and 'by an estimate' not in page


def test_json_keeps_it(gathered):
    assert Plan.load(gathered.to_json()) == gathered


def test_a_diff_names_the_devices(gathered):
    other = dataclasses.replace(gathered, device_kind='NVIDIA H200')
    assert '8 devices of h200' in gathered.diff(other)


# --- Searches -------------------------------------------------------------------------------------


def make_step(helper):
    step = helper.sjit(lambda w, x: x @ w, in_shardings=(P('fsdp', 'tp'), P('fsdp')), out_shardings=P('fsdp'))
    return step, (array(1024, 1024),) * 2


@pytest.mark.medium
@gpu_compiler.needed
def test_a_search():
    result = search(make_step, 'h100:2x4', ['fsdp', 'tp'], constraints={'tp': [1, 2, 4]})
    assert result.fits and all(candidate.plan.platform == 'gpu' for candidate in result.candidates)
    assert result.num_full_plans == 0
    assert 'in full' not in str(result)


@gpu_compiler.needed
def test_a_search_with_an_axis_over_hosts():
    result = search(
        make_step,
        'h100:4',
        ['fsdp', 'tp'],
        num_slices=2,
        dcn_axis='fsdp',
        constraints={'tp': 4},
    )
    assert {position.slice for position in result.best.device_positions} == {0, 1}


@pytest.mark.slow
@gpu_compiler.needed
def test_find():
    result = autoshard(
        lambda w, x: x @ w,
        (array(1024, 1024), array(1024, 1024)),
        'h200:8',
        batch_argnums=1,
    )
    assert result.plan.hardware is HARDWARE['h200']
    assert result.fits is True
    assert "'h200:8'" in result.to_code()
