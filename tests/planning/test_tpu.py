"""Plans for TPUs that are not attached, with the real TPU compiler, on small programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from examples import plan_llama
from scalax._core.render.tables import human_flops
from scalax._planning.compiler import compilation
from scalax.errors import ArgumentError, PlanError
from scalax.plan import HARDWARE, HostTransfers, Plan, make_plan
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support import executable_reader, tpu_compiler
from tests.support.collective_programs import rows

pytestmark = tpu_compiler.needed
GIB = 2**30


@functools.cache
def helper(topology, *axes, **options):
    """Returns a helper for a topology: helper('v5e:2x4', ('fsdp', 4), ('tp', 2))."""
    names, dims = zip(*axes, strict=True)
    return MeshShardingHelper.from_topology(topology, dims, names, **options)


def v5e():
    return helper('v5e:2x4', ('fsdp', 4), ('tp', 2))


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def train_step(over, layers, width, tokens):
    """Returns a gradient step of stacked two-layer blocks with FSDP and TP, and its arguments."""

    def layer(x, w):
        return jnp.tanh(x @ w['up']) @ w['down'], None

    def loss(params, x):
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, params)[0].astype('float32')).mean()

    def step(params, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

    rule = TreePathShardingRule(('up', P(None, 'fsdp', 'tp')), ('down', P(None, 'tp', 'fsdp')))
    fun = over.sjit(step, in_shardings=(rule, P('fsdp')), out_shardings=rule, donate_argnums=0)
    params = {'up': array(layers, width, 4 * width), 'down': array(layers, 4 * width, width)}
    return fun, (params, array(tokens, width))


def quick(over, fun, *arguments):
    return make_plan(over, fun, arguments, {}, quick=True)


# --- Collectives ----------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize(
    'over',
    [
        functools.partial(helper, 'v5e:2x4', ('fsdp', 2), ('tp', 4)),
        # The compiler unrolls a part of the backward pass, whose gathers have no names.
        functools.partial(
            helper, 'v5e:2x4', ('data', 4), ('fsdp', 2), ('tp', 4), num_slices=4, dcn_axis_dims=(4, 1, 1)
        ),
        # The compiler moves gathers into calls, which get their names.
        functools.partial(helper, 'tpu7x:2x2x1', ('fsdp', 2), ('tp', 4)),
    ],
    ids=['one slice', 'four slices', 'tpu7x'],
)
def test_a_gather_is_that_of_its_pass(over):
    over = over()

    def step(w, x):
        def loss(w):
            return jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]).mean()

        return w - jax.grad(loss)(w)

    weights, batch = P(None, 'fsdp', 'tp'), P([*over.mesh.shape][:-1])
    fun = over.sjit(step, in_shardings=(weights, batch), out_shardings=weights)
    plan = quick(over, fun, array(4, 1024, 1024), array(4096, 1024))
    gathers = {(row.axes, row.phase): row.count for row in plan.collectives if row.kind == 'all-gather'}
    axes = ('fsdp',), ('tp',)
    assert gathers == {(axis, phase): 4 for axis in axes for phase in ('forward', 'backward')}
    assert {row.cause for row in plan.collectives} == {'sharding'}
    assert {row.partitioned_as for row in plan.collectives} == {'', 'all-reduce'}


@functools.cache
def block():
    """Gathered weights, partial sums, and matmuls that wait for both, compared in full."""
    step, arguments = train_step(v5e(), 4, 256, 1024)
    return v5e().plan(step, *arguments)


@pytest.mark.slow
@tpu_compiler.newest
def test_a_plan_counts_what_its_executable_runs():
    step, arguments = train_step(v5e(), 4, 256, 1024)
    text = step.lower(*arguments).compile().as_text()
    expected = executable_reader.read(text, dict(v5e().mesh.shape)).collectives
    assert rows(block()) == expected
    assert rows(quick(v5e(), step, *arguments)) == expected
    assert {axes for _, axes in expected} >= {('fsdp',), ('tp',)}
    assert all(row.cause != 'compiler' for row in block().collectives)


def _with_arguments(step_and_arguments):
    fun, arguments = step_and_arguments
    return fun, *arguments


# --- Memory ---------------------------------------------------------------------------------------


def matmul():
    """Returns a step that is large, but compiles fast, and its arguments."""

    def gradient(w, x):
        return jax.grad(lambda w: jnp.square(x @ w).astype('float32').sum())(w)

    step = v5e().sjit(
        gradient,
        in_shardings=(P('tp', 'fsdp'), P('fsdp', 'tp')),
        out_shardings=P('tp', 'fsdp'),
        donate_argnums=0,
    )
    return step, (array(4096, 4096), array(1 << 18, 4096))


@functools.cache
def matmul_in_full():
    step, arguments = matmul()
    return v5e().plan(step, *arguments)


@pytest.mark.slow
@tpu_compiler.newest
def test_memory_is_the_compilers_own():
    plan = matmul_in_full()
    step, arguments = matmul()
    stats = step.lower(*arguments).compile().memory_analysis()
    # At the peak, nothing is in the vector memory of a chip. A few scalars do not count there.
    assert plan.memory.peak == pytest.approx(stats.peak_memory_in_bytes, rel=1e-5)
    assert plan.memory.arguments == stats.argument_size_in_bytes
    assert plan.memory.donated == stats.alias_size_in_bytes
    assert plan.memory.total == stats.total_allocation_bytes
    assert plan.memory.limit == HARDWARE['v5e'].hbm_bytes
    assert (plan.fits, plan.refusal) == (True, '')
    assert not plan.memory.estimated and not plan.quick
    # They are also known for a program that fits.
    held = {row.array: str(row.source) for row in plan.buffers}
    assert held['bf16[65536,2048]'] == 'argument x'
    assert 0.99 < sum(row.bytes for row in plan.buffers) / plan.memory.peak <= 1


@pytest.mark.medium
def test_quick_memory_is_that_of_a_full_plan():
    plan = matmul_in_full()
    step, arguments = matmul()
    hurried = v5e().plan(step, *arguments, quick=True)
    assert (plan.quick, hurried.quick, hurried.fits, hurried.refusal) == (False, True, True, '')
    assert hurried.memory.peak == pytest.approx(plan.memory.peak, rel=0.08)
    assert hurried.memory.arguments == plan.memory.arguments
    assert hurried.memory.donated == plan.memory.donated
    assert (hurried.collectives, hurried.flops, hurried.device_cost) == (
        plan.collectives,
        plan.flops,
        plan.device_cost,
    )
    assert hurried.roofline() == plan.roofline()
    message = (
        'memory of each device (quick: the layout before code generation, a rough guide for small programs): '
    )
    assert message in str(hurried)
    assert Plan.load(hurried.to_json()) == hurried


@pytest.mark.medium
def test_a_quick_plan_that_does_not_fit():
    over = v5e()
    hurried = quick(over, *_with_arguments(train_step(over, 48, 16384, 32768)))
    assert (hurried.fits, hurried.refusal) == (False, '')
    assert hurried.memory.peak == pytest.approx(refused().memory.peak, rel=0.08)
    assert hurried.buffers[0].bytes == refused().buffers[0].bytes


@functools.cache
def refused():
    return v5e().plan(*_with_arguments(train_step(v5e(), 48, 16384, 32768)))


@pytest.mark.medium
def test_a_plan_that_does_not_fit():
    plan = refused()
    weight_bytes = 48 * 16384 * 65536 * 2  # bytes of one of the two weights
    assert plan.fits is False
    assert plan.refusal.startswith('RESOURCE_EXHAUSTED: ')
    assert 'exceeds available HBM (15.75G)' in plan.refusal
    assert plan.memory.arguments == 2 * weight_bytes // 8 + 32768 // 4 * 16384 * 2
    assert plan.memory.donated == 2 * weight_bytes // 8
    assert f'required for HLO temporaries ({plan.memory.total / GIB:.2f}G)' in plan.refusal
    assert 0.99 * plan.memory.total < plan.memory.peak < plan.memory.total  # without gaps
    # Results that do not depend on the memory layout are available anyway.
    assert plan.flops == 7 * 2 * 48 * 32768 * 16384 * 65536  # 2 forward, 4 backward, 1 recomputed
    assert rows(plan) == rows(quick(v5e(), *_with_arguments(train_step(v5e(), 48, 16384, 32768))))
    assert 'weight params/up for dot_general' in {row.reason for row in plan.collectives}
    assert [(row.path, row.spec, row.bytes_per_device) for row in plan.inputs.rows] == [
        ('params/down', P(None, 'tp', 'fsdp'), weight_bytes // 8),
        ('params/up', P(None, 'fsdp', 'tp'), weight_bytes // 8),
        ('x', P('fsdp'), 32768 // 4 * 16384 * 2),
    ]
    assert [(row.path, row.spec) for row in plan.outputs.rows] == [
        ('down', P(None, 'tp', 'fsdp')),
        ('up', P(None, 'fsdp', 'tp')),
    ]


def test_the_largest_buffers_have_names():
    buffers = refused().buffers
    assert [row.bytes for row in buffers] == sorted((row.bytes for row in buffers), reverse=True)
    named = {str(row.source): row.array for row in buffers}
    assert named["argument params['up']"] == 'bf16[48,4096,32768]'
    assert named["argument params['down']"] == 'bf16[48,32768,4096]'
    others = [row.source for row in buffers if not row.source.operand]
    assert {source.file for source in others} == {__file__}
    # They are all live arrays, except the ones too small to be listed.
    assert 0.99 < sum(row.bytes for row in buffers) / refused().memory.peak <= 1


def test_text_of_memory_and_bottleneck():
    lines = str(refused()).splitlines()
    peak = f'{refused().memory.peak / GIB:.1f} GiB'
    assert lines[0] == 'step on 8 devices of v5e (fsdp=4, tp=2)'
    assert lines[2] == (f'memory of each device: {peak} of 15.8 GiB: it does NOT fit')
    assert lines[6] == f'live at the peak: {peak}, 99 % with a known source:'
    assert lines[9].startswith('12.0 GiB  bf16[48,')
    assert any(line.startswith('one call on 8 devices of v5e: ') for line in lines)
    # Two matmuls per layer, one pass forward and two backward, and one recomputed: 6 of 7 are the model's.
    [bound] = [line for line in lines if line.startswith('bound by ')]
    assert (
        bound == f'bound by compute; MFU at most 85.2%: the model needs {human_flops(refused().model_flops)}'
    )


def test_memory_on_the_host():
    over, spec = v5e(), P('fsdp', 'tp')
    device = NamedSharding(over.mesh, spec)
    host = device.with_memory_kind('pinned_host')

    def step(w, momentum):
        momentum = 0.9 * jax.device_put(momentum, device) + w
        return w - momentum, jax.device_put(momentum, host)

    fun = over.sjit(step, in_shardings=(device, host), out_shardings=(device, host), donate_argnums=(0, 1))
    plan = quick(over, fun, array(4096, 8192), array(4096, 8192))
    layer_bytes = 4096 * 8192 * 2 // 8  # bytes of each, on each device
    assert (plan.memory.arguments, plan.memory.host) == (layer_bytes, layer_bytes)
    assert plan.host_transfers == HostTransfers(to_host=layer_bytes, from_host=layer_bytes)
    assert plan.roofline().bottleneck == 'host:out'
    assert '  on the host     8.0 MiB, 8.0 MiB are written there and 8.0 MiB read in one call' in str(plan)


def test_tables_in_an_unknown_form_leave_the_compilers_figures(monkeypatch):
    def unknown(*_):
        raise PlanError('the compiler wrote the memory of the program in an unknown form')

    monkeypatch.setattr(compilation, 'read_layout', unknown)
    step = v5e().sjit(lambda x: x @ x.T, in_shardings=P('fsdp'))
    plan = v5e().plan(step, array(512, 512))
    stats = step.lower(array(512, 512)).compile().memory_analysis()
    assert (plan.memory.peak, plan.buffers) == (stats.peak_memory_in_bytes, ())


def test_unused_arguments_and_unspecified_shardings():
    over = v5e()
    wide = array(1 << 18, 1 << 17)

    def fun(unused, x, y):
        return x @ y.T, x.sum(0)

    step = over.sjit(fun, in_shardings=(P('tp'), P(('fsdp', 'tp')), P()), keep_unused=False)
    plan = quick(over, step, array(16), wide, wide)
    assert plan.fits is False
    assert [(row.path, row.spec) for row in plan.inputs.rows] == [
        ('unused', None),
        ('x', P(('fsdp', 'tp'))),
        ('y', P()),
    ]
    assert [row.spec for row in plan.outputs.rows] == [None, None]


def test_typed_keys_have_the_shape_that_jax_shows():
    over = v5e()
    step = over.sjit(
        lambda keys, x: x + jax.vmap(jax.random.normal)(keys)[:, None],
        in_shardings=(P('tp'), P('tp', 'fsdp')),
        out_shardings=P('tp', 'fsdp'),
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1 << 14))
    plan = quick(over, step, keys, array(1 << 14, 1 << 14, dtype=jnp.float32))
    assert plan.quick and plan.memory.peak > 2**26
    assert [(row.path, row.shape, row.spec) for row in plan.inputs.rows] == [
        ('keys', (1 << 14,), P('tp')),
        ('x', (1 << 14, 1 << 14), P('tp', 'fsdp')),
    ]


# --- Other slices ---------------------------------------------------------------------------------


def test_slices_talk_over_the_data_centres_network():
    over = helper('v5e:2x4', ('data', 2), ('fsdp', 8), num_slices=2, dcn_axis_dims=(2, 1))
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    step = over.sjit(
        lambda w, x: jax.grad(lambda w: jnp.square((x @ w).astype('float32')).sum())(w),
        in_shardings=(rule, P(('data', 'fsdp'))),
        out_shardings=rule,
    )
    plan = quick(over, step, array(1024, 1024), array(4096, 1024))
    assert {position.slice for position in plan.device_positions} == {0, 1}
    parts = plan.roofline().parts
    assert set(parts) >= {'ici:fsdp'} and any(name.startswith('dcn:') for name in parts)
    assert plan.fits
    carried = {('data',): ('dcn',), ('fsdp',): ('ici',), ('data', 'fsdp'): ('ici', 'dcn')}
    assert {row.axes: row.networks for row in plan.collectives}.items() <= carried.items()
    assert plan.networks == {axes: carried[axes] for axes in plan.totals}
    assert Plan.load(plan.to_json()) == plan
    assert 'along fsdp (ici): ' in str(plan)
    assert re.search(r'\n\S+ +fsdp \(ici\) +1  ', plan.to_text(120))
    assert '>fsdp</span> (ici)<' in plan._repr_html_()


@pytest.mark.medium
@pytest.mark.parametrize(
    ('axes', 'senders'),
    [([('x', 16)], 1), ([('x', 2), ('y', 8)], 8)],
    ids=['one chip sends', 'all chips send'],
)
def test_a_permute_between_slices_is_charged_once(axes, senders):
    """One of 24 iterations: both networks are used at the same time, and each is charged once.

    The chips of a v5e:2x4 belong to one host, and share its network.
    """
    names = [name for name, _ in axes]
    over = helper('v5e:2x4', *axes, num_slices=2, dcn_axis_dims=(2, 1)[: len(axes)])

    @functools.partial(over.shard_map, in_specs=P(tuple(names)), out_specs=P(tuple(names)))
    def turn(x):
        size = over.mesh.shape['x']
        ring = [(i, (i + 1) % size) for i in range(size)]
        return jax.lax.fori_loop(0, 24, lambda _, x: 2 * jax.lax.ppermute(x, 'x', ring), x)

    plan = over.plan(over.sjit(turn, in_shardings=P(tuple(names))), array(16 * 2**18, dtype='float32'))
    assert plan.count('collective-permute') == 24
    [row] = plan.collectives
    parts = plan.roofline().parts
    chip_bytes = 4 * 2**18  # the bytes that each chip sends per iteration
    assert parts['dcn:x'] == pytest.approx(24 * senders * chip_bytes / HARDWARE['v5e'].dcn_bytes_per_second)
    if senders == 1:
        assert row.networks == ('ici', 'dcn')
        assert parts['ici:x'] == pytest.approx(
            24 * chip_bytes / HARDWARE['v5e'].ici_bytes_per_second, rel=1e-2
        )
    else:
        assert row.networks == ('dcn',)


@pytest.mark.slow
def test_a_line_of_the_table_of_llama():
    small = plan_llama.Llama3(width=256, layers=2, heads=4, kv_heads=2, vocabulary=1024, units=512)
    case = plan_llama.Case('small', small, 'v5e:2x2', {'fsdp': -1, 'tp': 2})
    plan = plan_llama.plan_case(case, quick=True)
    assert (plan.mesh, plan.fits, plan.quick) == ({'fsdp': 2, 'tp': 2}, True, True)
    # Layers are recomputed in the backward pass (8 for 6), and attention includes the masked half.
    assert 1 < plan.flops / plan.model_flops < 2 * 8 / 6
    cells = plan_llama.line(case, plan, 1).split(' | ')
    assert cells[:3] == ['| small', 'v5e:2x2', 'fsdp=2 tp=2']


@pytest.mark.medium
@pytest.mark.parametrize(('name', 'devices', 'per_chip'), [('v4', 64, 1), ('tpu7x', 128, 2)])
def test_every_kind_of_chip_has_seconds(name, devices, per_chip):
    over = helper(f'{name}:4x4x4', ('fsdp', -1), ('tp', 4))
    step, arguments = train_step(over, 2, 1024, 4096)
    plan = quick(over, step, *arguments)
    roofline = plan.roofline()
    assert (plan.devices, plan.memory.limit) == (devices, HARDWARE[name].hbm_bytes)
    assert roofline.peak == devices / per_chip * HARDWARE[name].flops_per_second
    # A cube has wraparound links: https://jax-ml.github.io/scaling-book/tpus, "TPU Networking".
    segments = {segment for row in roofline.communication for segment in row.segments}
    assert segments and all(segment.ring for segment in segments)


def test_one_device():
    over = helper('v5e:1x1', ('x', 1))
    plan = quick(over, over.sjit(lambda x: x @ x, in_shardings=P()), array(256, 256))
    assert (plan.devices, plan.collectives, plan.fits) == (1, (), True)
    assert plan.flops == plan.device_cost.flops == 2 * 256**3


@pytest.mark.medium
def test_a_plan_survives_a_round_trip_through_json(tmp_path):
    path = tmp_path / 'plan.json'
    path.write_text(refused().to_json())
    assert Plan.load(path) == refused()
    assert not refused().diff(Plan.load(path))
    fitting = dataclasses.replace(refused(), refusal='', buffers=())
    assert 'it does NOT fit' in refused().diff(fitting)


@pytest.mark.parametrize('hurried', [True, False])
@pytest.mark.parametrize('wrapped', [lambda fun: fun, jax.jit])
def test_steps_without_shardings_are_rejected(wrapped, hurried, snapshot):
    def product(x):
        return x @ x

    with snapshot.raises(ArgumentError):
        v5e().plan(wrapped(product), array(256, 256), quick=hurried)


@pytest.mark.medium
def test_flags_of_the_environment_are_shown(monkeypatch):
    flag = '--xla_tpu_enable_async_all_to_all=true'  # read when the compiler starts, so it has no effect here
    monkeypatch.setenv('LIBTPU_INIT_ARGS', f'{flag} --xla_tpu_use_enhanced_launch_barrier=true')
    helper = MeshShardingHelper.from_topology('v5e:2x2', [4], ['x'])
    step = helper.sjit(lambda x: x * 2, in_shardings=P('x'), out_shardings=P('x'))
    plan = helper.plan(step, jax.ShapeDtypeStruct((8, 128), 'float32'), quick=True)
    assert plan.flags == (flag,) and f'compiled with {flag}' in str(plan)
