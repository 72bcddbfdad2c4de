"""`helper.plan`: counts and bytes of collectives, compared with programs whose collectives are known."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from scalax._planning.compiler import compilation
from scalax.errors import ArgumentError, MeshError, PlanError
from scalax.plan import Buffer, Exactness, HostTransfers, Memory, Plan, Source
from scalax.sharding import (
    MeshShardingHelper,
    with_sharding_annotation,
    with_sharding_constraint,
)
from scalax.sharding import PartitionSpec as P
from tests.support.collective_programs import CUBE, F32, HELPER, PROGRAMS, data_parallel, rows
from tests.support.leaves import leaf


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('program', PROGRAMS.values(), ids=PROGRAMS)
def test_programs(program):
    helper, fun, arguments, expected = program()
    plan = helper.plan(fun, *arguments)
    assert rows(plan) == expected
    assert all(row.exactness is Exactness.EXACT for row in plan.collectives)


# --- Loops and branches ---------------------------------------------------------------------------


def halved(x):
    return with_sharding_constraint(jnp.tanh(x @ x), P('fsdp', 'tp'))


def gathers(fun, *arguments):
    """Returns the executions of all-gathers along fsdp, by exactness."""
    plan = HELPER.plan(HELPER.sjit(fun, in_shardings=P('fsdp', 'tp')), *arguments)
    counts = {}
    for row in plan.collectives:
        if row.axes == ('fsdp',):
            counts[row.exactness] = counts.get(row.exactness, 0) + row.count
    return counts


@pytest.mark.medium
@pytest.mark.parametrize(
    ('start', 'stop', 'trips'),
    [(0, 7, 7), (2, 11, 9), (3, 3, 0), (5, 6, 1)],
)
def test_trip_counts(start, stop, trips):
    counts = gathers(lambda x: jax.lax.fori_loop(start, stop, lambda i, x: halved(x), x), leaf(64, 64))
    assert counts == ({Exactness.EXACT: trips} if trips else {})


def test_a_step_of_two():
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, halved(c[1])), (0, x))[1]

    assert gathers(loop, leaf(64, 64)) == {Exactness.EXACT: 5}


def test_a_loop_whose_length_depends_on_data_is_a_lower_bound():
    def loop(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, halved, x)

    plan = HELPER.plan(HELPER.sjit(loop, in_shardings=P('fsdp', 'tp')), leaf(64, 64))
    assert {row.exactness for row in plan.collectives if row.bytes > 64} == {Exactness.AT_LEAST}
    assert '>=1' in str(plan)


def test_a_branch_is_an_upper_bound():
    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, halved, lambda x: x, x)

    plan = HELPER.plan(HELPER.sjit(branch, in_shardings=P('fsdp', 'tp')), leaf(64, 64))
    assert {row.exactness for row in plan.collectives if row.bytes > 64} == {Exactness.AT_MOST}


# --- Sources --------------------------------------------------------------------------------------


def test_sources():
    def model(w, x):
        y = jnp.tanh(x @ w)  # the line that gathers
        return with_sharding_annotation(y @ w.T, 'out')  # the line that reduces

    step = HELPER.sjit(
        model, in_shardings=(P('fsdp', 'tp'), P('fsdp')), annotation_shardings={'out': P('fsdp')}
    )
    plan = HELPER.plan(step, leaf(64, 64), leaf(16, 64))
    first = model.__code__.co_firstlineno
    [reduce] = [row for row in plan.collectives if row.kind == 'all-reduce']
    assert (reduce.source.annotation, reduce.source.line) == ('out', first + 2)
    assert reduce.source.function.endswith('model')
    gathers = [row for row in plan.collectives if row.kind == 'all-gather']
    assert {row.source.line for row in gathers} == {first + 1, first + 2}
    assert all(row.source.file == __file__ for row in plan.collectives)


def test_names_with_letters_and_signs_of_all_kinds():
    """Programs contain them escaped, in two ways."""
    names, file = {}, '/home/josé/"a\\b".py'
    exec(compile('def größe(x, w):\n    return (x @ w["ö\\""]).sum(0)', file, 'exec'), names)
    helper = MeshShardingHelper([4, 2], ['fsdp', 'a]"b'])
    step = helper.sjit(names['größe'], in_shardings=(P('fsdp'), {'ö"': P(None, 'a]"b')}))
    plan = helper.plan(step, leaf(64, 64), {'ö"': leaf(64, 64)})
    [reduce] = plan.collectives
    assert (reduce.axes, reduce.source) == (('fsdp',), Source('', file, 2, 'größe'))
    assert [(row.path, row.spec) for row in plan.inputs.rows] == [
        ('x', P('fsdp')),
        ('w/ö"', P(None, 'a]"b')),
    ]


def test_an_argument_that_is_moved_is_named():
    fun = HELPER.sjit(
        lambda batch: batch['rows'], in_shardings=P('fsdp'), out_shardings=P(), keep_unused=True
    )
    plan = HELPER.plan(fun, {'rows': leaf(64), 'others': leaf(8)})
    assert [str(row.source) for row in plan.collectives] == ["argument batch['rows']"]


# --- The rest of a plan ---------------------------------------------------------------------------


def step(params, x, unused=None, *, scale=2, **more):
    total = scale * x.sum()
    return {name: w + total for name, w in params.items()}


STEP = HELPER.sjit(
    step,
    in_shardings={'params': P('fsdp', 'tp'), 'x': P('fsdp'), 'y': P()},
    out_shardings=P('fsdp', 'tp'),
    donate_argnames='params',
)
ARGUMENTS = {'w': leaf(64, 32), 'v': leaf(8, 4)}, leaf(16)


def test_inputs_and_outputs():
    plan = HELPER.plan(STEP, *ARGUMENTS, np.ones(3, np.float32), scale=3, y=leaf(5))
    assert [(row.path, row.spec) for row in plan.inputs.rows] == [
        ('params/v', P('fsdp', 'tp')),
        ('params/w', P('fsdp', 'tp')),
        ('x', P('fsdp')),
        ('unused', None),
        ('scale', P()),
        ('y', None),  # unused: JAX drops it
    ]
    assert [(row.path, row.spec) for row in plan.outputs.rows] == [
        ('v', P('fsdp', 'tp')),
        ('w', P('fsdp', 'tp')),
    ]


def test_memory():
    plan = HELPER.plan(STEP, *ARGUMENTS)
    held = (64 * 32 + 8 * 4) // 8 * F32
    assert plan.memory.arguments == held + 16 // 4 * F32
    assert plan.memory.donated == held
    assert plan.memory.outputs == plan.outputs.bytes_per_device - held + 2 * 8  # plus a table of pointers
    assert plan.memory.total == plan.memory.arguments + plan.memory.outputs + plan.memory.temporaries
    assert plan.memory.estimated


def test_constants_of_a_program_take_memory():
    baked = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    plain, with_constant = (
        HELPER.plan(HELPER.sjit(fun, in_shardings=P('fsdp'), out_shardings=P('fsdp')), leaf(16, 64)).memory
        for fun in (lambda x: x + 1, lambda x: x @ baked)
    )
    assert with_constant.temporaries - plain.temporaries >= baked.nbytes
    assert with_constant.peak == with_constant.total


@pytest.mark.medium
def test_text():
    assert (
        HELPER.plan(STEP, *ARGUMENTS).to_text(100).splitlines()[0] == 'step on 8 cpu devices (fsdp=4, tp=2)'
    )
    lines = HELPER.plan(PROGRAMS['data_parallel']()[1], leaf(64, 32), leaf(16, 64)).to_text(90).splitlines()
    # Nothing is sharded along tp.
    assert lines[2] == 'the devices compute 2 times that: halos, or work that is not sharded'
    assert lines[3].startswith('memory of each device (estimated by XLA for cpu): ')
    first = lines.index('collectives in one call (bytes: the gathered array of one group, per execution):')
    assert lines[first + 1 :] == [
        'collective  axes  times    bytes    total  phase     reason',
        '-' * len(lines[first + 2]),
        lines[first + 3],
        '',
        'along fsdp: 8.0 KiB in all-reduces',
        '',
        'not partitioned along its batch: batch_argnums=() turns it off',
    ]
    row = 'all-reduce  fsdp      1  8.0 KiB  8.0 KiB  backward  collective_programs.py:'
    assert lines[first + 3].startswith(row)
    assert all(len(line) <= 90 for line in lines)
    parts = next(i for i, line in enumerate(lines) if line.split()[:2] == ['phase', 'FLOPs'])
    assert lines[parts + 2].split()[0] == 'forward' and lines[parts + 3].endswith('8.0 KiB')
    narrow = HELPER.plan(PROGRAMS['data_parallel']()[1], leaf(64, 32), leaf(16, 64)).to_text(70).splitlines()
    # The row has two lines.
    assert [not line for line in narrow[-6:]] == [False, False, True, False, True, False]


@pytest.mark.medium
@pytest.mark.parametrize(
    ('changes', 'why'),
    [
        ({'kind': 'all-to-all', 'partitioned_as': 'all-reduce'}, 'for an all-reduce: '),
        ({'kind': 'reduce-scatter', 'partitioned_as': 'all-reduce'}, ''),  # is written like this
        ({'kind': 'all-to-all', 'partitioned_as': 'all-reduce', 'cause': 'halo'}, 'halo exchange: '),
    ],
)
def test_text_of_a_changed_kind(changes, why):
    plan = HELPER.plan(STEP, *ARGUMENTS)
    first, *rest = plan.collectives
    changed = dataclasses.replace(plan, collectives=(dataclasses.replace(first, **changes), *rest))
    [line] = [line for line in changed.to_text(160).splitlines() if line.startswith(changes['kind'])]
    assert line.endswith(f'  {why}{first.source}')


def test_text_of_memory_and_of_quick_plans():
    plan = HELPER.plan(STEP, *ARGUMENTS)
    memory = Memory(2**20, outputs=0, temporaries=5 * 2**20, estimated=False, limit=2**34, peak=2**22)
    full = dataclasses.replace(plan, platform='tpu', memory=memory)
    assert full.to_text(100).splitlines()[1:6] == [
        'memory of each device: 4.0 MiB of 16.0 GiB: it fits',
        '  arguments       1.0 MiB',
        '  outputs             0 B',
        '  temporaries     5.0 MiB, not all live at once',
        '',
    ]
    # A program also allocates the gaps.
    tight = dataclasses.replace(full, quick=True, memory=dataclasses.replace(memory, limit=5 * 2**20))
    assert tight.fits is False
    message = '4.0 MiB, and 6.0 MiB with gaps between arrays, of 5.0 MiB: it does NOT fit'
    assert tight.to_text(200).splitlines()[1].endswith(message)
    message = '  temporaries     5.0 MiB, not all live at once; a full plan may have more'
    assert tight.to_text(200).splitlines()[4] == message
    line = Source(file='job.py', line=7, function='layer')
    buffers = (
        Buffer(5 * 2**19, 'f32[256,1280]', line, 2),
        Buffer(2**20, 'f32[512,512]', Source(operand='x')),
    )
    held = dataclasses.replace(
        full,
        memory=dataclasses.replace(memory, host=2**23),
        buffers=(*buffers, Buffer(2**18, 'f32[256,256]', Source())),
        host_transfers=HostTransfers(2**23, 2**24),
    )
    assert held.to_text(100).splitlines()[4:13] == [
        '  temporaries     5.0 MiB, of which 2.0 MiB are gaps at the peak',
        '  on the host     8.0 MiB, 8.0 MiB are written there and 16.0 MiB read in one call',
        'live at the peak: 4.0 MiB, 87 % with a known source:',
        '    bytes  array              source',
        '--------------------------------------------',
        '  2.5 MiB  2 x f32[256,1280]  job.py:7 layer',
        '  1.0 MiB  f32[512,512]       argument x',
        '256.0 KiB  f32[256,256]       not known',
        '256.0 KiB  smaller arrays',
    ]
    # Comparing most of it is enough.
    most = dataclasses.replace(held, buffers=tuple(Buffer(2**19, f'f32[{i}]', line) for i in range(8)))
    assert most.to_text(100).splitlines()[16:18] == [
        '512.0 KiB  f32[7]  job.py:7 layer',
        '',
    ]
    assert Plan.load(held.to_json()) == held
    for peak, message in {2**31 - 1: ', a rough guide for small programs', 2**31: ''}.items():
        source = f'(quick: the layout before code generation{message})'
        memory = dataclasses.replace(memory, peak=peak)
        assert source in str(dataclasses.replace(full, quick=True, memory=memory))


def test_the_link_to_the_host_is_timed_if_it_is_used():
    plan = HELPER.plan(STEP, *ARGUMENTS)
    offloads = dataclasses.replace(plan, host_transfers=HostTransfers(2**23, 2**24, Exactness.AT_LEAST))
    torus = {'fsdp': 4, 'tp': 2}
    roofline = offloads.roofline('v6e', torus=torus)
    assert roofline.parts['host:out'] == pytest.approx(2**23 / 3.2e10)
    assert roofline.parts['host:in'] == pytest.approx(2**24 / 3.2e10)
    assert (roofline.bottleneck, roofline.exactness) == ('host:in', Exactness.AT_LEAST)
    assert '  host:in ' in str(roofline)
    assert offloads.roofline('v4', torus=torus).parts['host:in'] == pytest.approx(2**24 / 1.6e10)
    assert not any(name.startswith('host') for name in plan.roofline('tpu7x', torus=torus).parts)
    with pytest.raises(PlanError, match='lacks: host_bytes_per_second'):
        offloads.roofline('tpu7x', torus=torus)


def resharded(x, *specs):
    for spec in specs:
        x = jnp.sin(with_sharding_constraint(x, spec))
    return x


@pytest.mark.medium
@pytest.mark.parametrize(
    ('function', 'cause', 'advice'),
    [
        (  # XLA's term: "Involuntary full rematerialization"
            lambda x: resharded(x, P(('fsdp', 'tp')), P(None, 'fsdp')),
            'resharding',
            'gathered in full and sliced again: XLA found no direct way between two shardings',
        ),
        (lambda x: resharded(x, P('fsdp'), P(None, 'fsdp')), 'sharding', ''),
        (lambda x: resharded(x, P('fsdp'), P())[3:5], 'sharding', ''),
        (lambda x: jax.lax.dynamic_slice(resharded(x, P('fsdp'), P()), (3, 0, 0), (8, 8, 8)), 'sharding', ''),
        (
            lambda x: sum(jnp.split(resharded(x, P(None, 'fsdp')), 3, axis=1)),
            'halo',
            'halo exchange: a sharded dimension is sliced or shifted. Split a fused weight',
        ),
    ],
    ids=['no direct way', 'a direct way', 'a slice', 'a dynamic slice', 'fused'],
)
def test_advice_for_causes(function, cause, advice):
    plan = HELPER.plan(HELPER.sjit(function), leaf(64, 96, 16))
    assert {row.cause for row in plan.collectives} == {cause}
    text = [line for line in str(plan).splitlines() if line.startswith(('gathered in full', 'halo exchange'))]
    assert [line[: len(advice)] for line in text] == ([advice] if advice else [])


def test_text_of_redundant_flops():
    """A convolution along a sharded dimension also multiplies the zeros beyond the edges."""

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))

    images, kernel = leaf(2, 16, 16, 8), leaf(3, 3, 8, 8)
    step = HELPER.sjit(convolve, in_shardings=(P(None, ('fsdp', 'tp')), P()))
    plan = HELPER.plan(step, images, kernel)
    assert {row.cause for row in plan.collectives} == {'halo'}
    # 46 pairs of an image row and a kernel row, and 48 on the devices.
    assert 8 * plan.device_cost.flops / plan.flops == pytest.approx(48 / 46)
    assert 'the devices compute 1.04 times that: halos, or work that is not sharded' in str(plan).splitlines()
    assert '1.04 times' in plan._repr_html_()
    pair = MeshShardingHelper([2], ['tp'], devices=jax.devices()[:2])
    rows = pair.sjit(convolve, in_shardings=(P('tp'), P()))
    assert 'the devices compute' not in str(pair.plan(rows, images, kernel))


def test_text_of_redundant_flops_in_a_loop_of_unknown_length():
    """The loop counts as one iteration, in the function and on the devices."""

    def converge(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ w, x)

    x = leaf(64, 64)
    for spec, line in (
        (P(), 'the devices compute at least 8 times that: halos, or work that is not sharded'),
        (P(('fsdp', 'tp')), None),
    ):
        plan = HELPER.plan(HELPER.sjit(converge, in_shardings=(spec, P())), x, x)
        assert plan.flops_exactness is plan.device_cost.exactness is Exactness.AT_LEAST
        assert next((text for text in str(plan).splitlines() if 'devices compute' in text), None) == line


@pytest.mark.parametrize(('slice_size', 'scattered'), [(4, True), (2, False)])
def test_a_sum_is_scattered_if_each_device_keeps_its_part(slice_size, scattered):
    def block(x):
        total = jax.lax.psum(x, 'a')
        return jax.lax.dynamic_slice_in_dim(total, slice_size * jax.lax.axis_index('a'), slice_size)

    plan = CUBE.plan(CUBE.shard_map(block, P(), P('a'), check_vma=False), leaf(8, 8))
    assert [(row.kind, row.axes, row.scattered) for row in plan.collectives] == [
        ('all-reduce', ('a',), scattered)
    ]


def test_a_program_without_shardings_runs_on_one_device():
    plan = HELPER.plan(lambda x: 2 * x, np.ones(4))
    assert (plan.devices, plan.collectives) == (1, ())
    assert str(plan).splitlines()[0] == '<lambda> on 1 of 8 cpu devices (fsdp=4, tp=2)'
    assert str(plan).splitlines()[-1] == 'collectives in one call: none'


def test_dtypes_are_those_on_the_devices():
    with jax.enable_x64(True):
        x = jnp.ones((4, 8), 'float64')
    plan = HELPER.plan(HELPER.sjit(lambda x: x, in_shardings=P('fsdp')), x)
    assert [(row.dtype, row.bytes) for row in (*plan.inputs.rows, *plan.outputs.rows)] == [
        ('float64', 256),
        ('float64', 256),
    ]


def test_dict():
    plan = HELPER.plan(STEP, *ARGUMENTS)
    read = json.loads(json.dumps(plan.to_dict()))
    assert read['collectives'][0] == {
        'kind': 'all-reduce',
        'axes': ['fsdp'],
        'group': 4,
        'count': 1,
        'exactness': 'exact',
        'bytes': F32,
        'cause': 'sharding',
        'crossing': 0,
        'networks': [],
        'partitioned_as': '',
        'phase': 'other',
        'reason': '',
        'replica_group': [],
        'scattered': False,
        'scopes': [{'scope': 'step()', 'count': 1}],
        'source': {
            'annotation': '',
            'file': __file__,
            'line': step.__code__.co_firstlineno + 1,
            'function': 'step',
            'operand': '',
        },
    }
    assert read['memory']['total'] == plan.memory.total
    assert read['mesh'] == {'fsdp': 4, 'tp': 2}


def test_sharded_arguments_are_planned_with_their_shardings():
    x = HELPER.shard(np.ones((64, 4), np.float32), P('fsdp'))
    plan = HELPER.plan(lambda x: x.sum(0), x)
    assert rows(plan) == {('all-reduce', ('fsdp',)): (1, 4 * F32)}


def test_explicit_axes():
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)
    fun = helper.sjit(lambda x: x.sum(0), in_shardings=P('fsdp', 'tp'))
    assert rows(helper.plan(fun, leaf(64, 8))) == {('all-reduce', ('fsdp',)): (1, 4 * F32)}


@pytest.mark.medium
def test_a_persistent_compilation_cache_hides_nothing(tmp_path):
    options = {
        'jax_compilation_cache_dir': str(tmp_path),
        'jax_persistent_cache_min_compile_time_secs': 0,
        'jax_persistent_cache_min_entry_size_bytes': 0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        helper, fun, arguments, expected = data_parallel()
        for _ in range(3):
            assert rows(helper.plan(fun, *arguments)) == expected
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_a_program_of_one_device_from_a_cache_is_compiled_again(monkeypatch):
    """A cached program has no dump, which a plan for an accelerator needs."""
    compile_, dumps = compilation._compile, []

    def cached_at_first(lowered, options):
        dump = compile_(lowered, options)
        dumps.append(dump if dumps else dump._replace(optimized=''))
        return dumps[-1]

    monkeypatch.setattr(compilation, '_compile', cached_at_first)
    compiled = compilation.compile_lowered(jax.jit(jnp.sin).lower(leaf(8, 8)), 'rocm')
    assert compiled.optimized == dumps[1].optimized != ''


@pytest.mark.parametrize(('devices', 'platform'), [(1, 'cpu'), (1, 'rocm'), (8, 'cpu'), (8, 'rocm')])
def test_a_program_that_is_in_no_cache_is_compiled_once(monkeypatch, devices, platform):
    compile_, dumps = compilation._compile, []
    monkeypatch.setattr(compilation, '_compile', lambda *args: dumps.append(compile_(*args)) or dumps[-1])
    sharding = HELPER.match_sharding_rule(P('fsdp'), leaf(8)) if devices > 1 else None
    x = jax.ShapeDtypeStruct((8,), 'float32', sharding=sharding)
    compiled = compilation.compile_lowered(jax.jit(jnp.cos).lower(x), platform)
    assert (len(dumps), compiled.executable) == (1, dumps[0].executable)


def test_none_among_arguments_and_outputs():
    fun = HELPER.sjit(lambda x, m=None: (x['x'].sum(), None), in_shardings=P('fsdp'), out_shardings=P())
    plan = HELPER.plan(fun, {'x': leaf(16), 'n': None}, None)
    assert [row.path for row in plan.inputs.rows] == ['x/x']
    assert [row.path for row in plan.outputs.rows] == ['0']


def test_arguments_of_jitted_functions_have_names():
    sharding = HELPER.match_sharding_rule(P('fsdp'), leaf(16))
    x = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)

    def fun(w, x, n=2):
        return w * x * n

    plan = HELPER.plan(jax.jit(fun), x=x, w=x)
    assert {row.path for row in plan.inputs.rows} == {'w', 'x'}
    assert plan.inputs.bytes_per_device == plan.memory.arguments
    assert [row.path for row in HELPER.plan(jax.jit(fun), x, x).inputs.rows] == ['w', 'x']
    static = HELPER.plan(jax.jit(fun, static_argnums=2), x, x, 3)
    assert [row.path for row in static.inputs.rows] == ['args[0]', 'args[1]']
    empty_key = HELPER.plan(jax.jit(lambda w: w), {'': x, 'a': {'': x}})
    assert [row.path for row in empty_key.inputs.rows] == ['w/', 'w/a/']


def test_methods():
    class Model:
        @functools.partial(HELPER.sjit, static_argnums=0, in_shardings=P('fsdp'), out_shardings=P())
        def total(self, x):
            return x.sum()

    assert HELPER.plan(Model().total, leaf(16)).count('all-reduce', 'fsdp') == 1


def test_counting_unknown_kinds_and_axes():
    plan = HELPER.plan(STEP, *ARGUMENTS)
    with pytest.raises(ArgumentError) as wrong:
        plan.count('all_reduce')
    assert str(wrong.value) == "there is no collective 'all_reduce' (did you mean 'all-reduce'?)"
    with pytest.raises(ArgumentError) as wrong:
        plan.count('all-reduce', 'fsdq')
    assert str(wrong.value) == "the mesh has no axis 'fsdq' (did you mean 'fsdp'?)"


def test_errors():
    with pytest.raises(ArgumentError) as wrong:
        HELPER.plan(leaf(3), step)
    assert str(wrong.value) == (
        'plan takes a function first, got ShapeDtypeStruct: helper.plan(step, *arguments)'
    )
    abstract = MeshShardingHelper.from_mesh(jax.sharding.AbstractMesh((4,), ('fsdp',)))
    with pytest.raises(MeshError, match='plan'):
        abstract.plan(step, leaf(3))


def test_long_axis_names_keep_lines_within_the_width():
    """The columns before the source column are wider than the page."""
    names = ('a' * 40, 'b' * 40)
    helper = MeshShardingHelper([4, 2], names)
    plan = helper.plan(
        helper.sjit(lambda w: w * 2, in_shardings=P(names), out_shardings=P()),
        jax.ShapeDtypeStruct((64,), 'float32'),
    )
    text = plan.to_text(60)
    table = text[text.index('collective ') : text.index('along ')].splitlines()
    assert max(map(len, table)) <= 60
    assert ''.join(text.split()).count('a' * 40)
