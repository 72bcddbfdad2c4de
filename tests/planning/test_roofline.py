"""Rooflines: worked examples of the scaling book, by chapter, and comparisons of programs.

The book is https://jax-ml.github.io/scaling-book (sources: https://github.com/jax-ml/scaling-book).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from scalax._planning.cost.collectives import collectives
from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.hardware.torus import DevicePosition, route_of, torus_of
from scalax._planning.program.hlo import parse
from scalax._planning.time.collective_time import collective_seconds
from scalax.errors import PlanError
from scalax.plan import (
    HARDWARE,
    Communication,
    DeviceCost,
    Exactness,
    Hardware,
    Roofline,
    ScopeCost,
    TorusSegment,
)
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.torus_seconds import seconds

V4, V5E, V5P, V6E = (HARDWARE[name] for name in ('v4', 'v5e', 'v5p', 'v6e'))
US = 1e-6
BF16 = 2


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- "Sharded Matrices and How to Multiply Them" (sharding.md) -------------------------------------

CUBE = (4, 4, 4)
B, D = 1024, 4096

# section of the chapter -> (kind, bytes, hardware, shape, axes, seconds, tolerance)
COLLECTIVES = {
    # "TPU v5e has no wraparound: 3 hops of 8.4 MB at 4.5e10"
    'Pop Quiz 2 [AllGather time]': ('all-gather', 2048 * 8192 * BF16, V5E, (8, 4), 'Y', 560 * US, 0.01),
    # "3 hops, roughly 3 us"
    'Pop Quiz 2, latency': ('all-gather', 256 * 256 * BF16, V5E, (8, 4), 'Y', 3 * US, 0.01),
    'Question 2 [AllGather latency], 1': ('all-gather', BF16 * B * D / 4, V4, CUBE, 'X', 23 * US, 0.02),
    'Question 2 [AllGather latency], 2': ('all-gather', BF16 * B * D / 4, V4, CUBE, 'Y', 23 * US, 0.02),
    'Question 2 [AllGather latency], 3': ('all-gather', BF16 * B * D, V4, CUBE, 'XY', 46 * US, 0.02),
    # An all-reduce of partial sums takes as long as two of the book's gathers.
    'Question 2 [AllGather latency], 4': ('all-reduce', BF16 * B * D / 16, V4, CUBE, 'Z', 2 * 5.8 * US, 0.02),
    # "the full gather in only 2 hops, so roughly 2 us"
    'Question 3 [latency-bound AllGather]': ('all-gather', BF16 * 128, V4, CUBE, 'X', 2 * US, 0.01),
    # "AllGather / 4 for a bidirectional ring"
    'What Have We Learned?, AllToAll': ('all-to-all', BF16 * B * D, V4, CUBE, 'X', 93.2 * US / 4, 0.01),
}


@pytest.mark.parametrize(
    ('kind', 'array_bytes', 'hardware', 'shape', 'axes', 'expected', 'near'),
    COLLECTIVES.values(),
    ids=COLLECTIVES,
)
def test_collectives_of_the_book(kind, array_bytes, hardware, shape, axes, expected, near):
    assert seconds(kind, array_bytes, hardware, shape, axes) == pytest.approx(expected, rel=near)


# --- "How to Parallelize a Transformer for Training" (training.md) ---------------------------------

RINGS = dataclasses.replace(V5P, ring_needs_all=False)  # whose rings of 8 represent the rings of a large cube
ALONG = MeshShardingHelper([8], ['X'])
WIDTH, HIDDEN = 1024, 4096


def forward(x, up, down):
    return (x @ up) @ down


def fsdp(batch):
    """In[B_X, D] W_in[D_X, F] W_out[F, D_X] -> Out[B_X, D]"""
    fun = ALONG.sjit(forward, in_shardings=(P('X'), P('X'), P(None, 'X')), out_shardings=P('X'))
    return ALONG.plan(fun, array(batch, WIDTH), array(WIDTH, HIDDEN), array(HIDDEN, WIDTH))


def data_parallel(batch):
    """The gradients of W_in and W_out are reduced over the batch."""

    def backward(x, up, down, g):
        return jax.vjp(lambda *params: forward(x, *params), up, down)[1](g)

    fun = ALONG.sjit(backward, in_shardings=(P('X'), P(), P(), P('X')), out_shardings=P())
    weights = array(WIDTH, HIDDEN), array(HIDDEN, WIDTH)
    return ALONG.plan(fun, array(batch, WIDTH), *weights, array(batch, WIDTH))


def tensor_parallel(hidden, batch=8192):
    """In[B, D_Y] W_in[D, F_Y] W_out[F_Y, D] -> Out[B, D_Y]"""

    def block(x, up, down):
        x = jax.lax.all_gather(x, 'X', axis=1, tiled=True)
        return jax.lax.psum_scatter(forward(x, up, down), 'X', scatter_dimension=1, tiled=True)

    specs = (P(None, 'X'), P(None, 'X'), P('X'))
    fun = jax.jit(ALONG.shard_map(block, specs, P(None, 'X'), check_vma=False))
    return ALONG.plan(fun, array(batch, WIDTH), array(WIDTH, hidden), array(hidden, WIDTH))


# "we are compute bound when the per-device batch size exceeds 4.59e14 / 1.8e11 = 2550 for v5p"
INTENSITY = 2550


@pytest.mark.medium
@pytest.mark.parametrize(('axes', 'torus'), [(1, 8), (3, (2, 2, 2))])
def test_fsdp_is_bound_by_communication_below_2550_tokens(axes, torus):
    """Chapter "Fully-Sharded Data Parallelism (FSDP)": less than 2550 / M_X."""
    hardware = dataclasses.replace(RINGS, ring_multiple=2)
    for share, compute_bound in [(0.99, False), (1.01, True)]:
        batch = 8 * int(share * INTENSITY / axes)
        parts = fsdp(batch).roofline(hardware, torus={'X': torus}).parts
        assert (parts['compute'] > parts['ici:X']) == compute_bound


@pytest.mark.medium
def test_data_parallelism_is_bound_by_communication_below_2550_tokens():
    """Chapter "Data Parallelism": two AllReduces of 2 D F bytes, and 8 B D F FLOPs."""
    for share, compute_bound in [(0.99, False), (1.01, True)]:
        batch = 8 * int(share * INTENSITY)
        plan = data_parallel(batch)
        # The backward pass has one matmul less: the gradient of the input is not needed.
        assert plan.flops == 2 * batch * WIDTH * HIDDEN * 4
        parts = plan.roofline(RINGS, torus={'X': 8}).parts
        assert parts['ici:X'] == pytest.approx(2 * 2 * BF16 * WIDTH * HIDDEN / 1.8e11)
        assert (parts['compute'] > parts['ici:X']) == compute_bound


@pytest.mark.medium
def test_tensor_parallelism_is_bound_by_communication_above_f_over_2550():
    """Chapter "Tensor Parallelism": F > Y C / W."""
    for share, compute_bound in [(0.99, False), (1.01, True)]:
        hidden = 8 * int(share * INTENSITY)
        parts = tensor_parallel(hidden).roofline(RINGS, torus={'X': 8}).parts
        assert (parts['compute'] > parts['ici:X']) == compute_bound


@pytest.mark.parametrize(('hidden', 'ways', 'compute_bound'), [(30_000, 8, True), (30_000, 16, False)])
def test_tensor_parallelism_of_llama(hidden, ways, compute_bound):
    """Ibid.: with F = 30,000 "we can do 8-way tensor parallelism, but will be bound on 16 way"."""
    batch, width = 48_000, 8192
    ring = dataclasses.replace(V5P, ring_multiple=ways)
    moved = sum(
        seconds(kind, BF16 * batch * width, dataclasses.replace(ring, ring_needs_all=False), (ways,), 'X')
        for kind in ('all-gather', 'reduce-scatter')
    )
    math_ = 4 * batch * width * hidden / (ways * V5P.flops_per_second)
    assert (math_ > moved) == compute_bound


def mixed(batch, hidden, fsdp_axes, tp_axes):
    """Returns the communication seconds of a block on a v5p 4x4x4, for axes of the torus."""
    width, x, y = 8192, 4 ** len(fsdp_axes), 4 ** len(tp_axes)
    weights = seconds('all-gather', BF16 * width * hidden / y, V5P, CUBE, fsdp_axes)
    rows = BF16 * batch * width / x
    activations = sum(seconds(kind, rows, V5P, CUBE, tp_axes) for kind in ('all-gather', 'reduce-scatter'))
    return max(2 * weights, activations)


def test_fsdp_and_tensor_parallelism():
    """Chapter "Combining FSDP and Tensor Parallelism": 64 chips, 16 x 4 for F = 32,768 and B = 48,000."""
    batch, hidden = 48_000, 32_768
    chosen = math.sqrt(batch / hidden * 2 / 1 * 64)
    assert chosen == pytest.approx(13.9, rel=0.02)
    assert mixed(batch, hidden, 'XY', 'Z') < mixed(batch, hidden, 'X', 'YZ')
    # "This gives roughly B / N > 99": with 2550^2 / (2 F), at the best split,
    # if axes could have any size. On a 4x4x4, 4 x 16 is the closest. "A factor of eight" less than with FSDP
    # over all three axes: 850.
    for tokens, compute_bound in [(90, (False, False)), (170, (True, False)), (860, (True, True))]:
        batch = 64 * tokens
        best = min(mixed(batch, hidden, 'XY', 'Z'), mixed(batch, hidden, 'X', 'YZ'))
        pure = 2 * seconds('all-gather', BF16 * 8192 * hidden, V5P, CUBE, 'XYZ')
        math_ = 4 * batch * 8192 * hidden / (64 * V5P.flops_per_second)
        assert (math_ > best, math_ > pure) == compute_bound


def test_scaling_across_pods():
    """Chapter "Scaling Across Pods": 71,360 tokens per slice for v5p; two AllReduces of 2 D F bytes."""
    slices, chips, width, hidden = 1000, 64, 8192, 30_000
    positions = [DevicePosition(index, (0, 0, 0)) for index in range(slices)]
    route = route_of(positions, torus_of(positions, V5P), 'data')
    moved = 2 * collective_seconds('all-reduce', BF16 * width * hidden / chips, route, V5P, 1).dcn
    for tokens, compute_bound in [(0.97 * 71_360, False), (1.06 * 71_360, True)]:
        math_ = 8 * tokens * width * hidden / (chips * V5P.flops_per_second)
        assert (math_ > moved) == compute_bound


# --- Other chapters -------------------------------------------------------------------------------


def test_loading_weights():
    """tpus.md, Question 1 [bounding LLM latency]: 400e9 bytes from the HBM of 32 v4: around 10 ms."""
    plan = MeshShardingHelper([8], ['X']).plan(lambda x: x, array(8))
    plan = dataclasses.replace(plan, device_cost=DeviceCost(bytes=int(400e9 / 32)), collectives=())
    roofline = plan.roofline(dataclasses.replace(V4, devices_per_chip=1))
    assert roofline.hbm == pytest.approx(10e-3, rel=0.05)
    assert (roofline.bottleneck, roofline.compute) == ('hbm', 0)


def test_a_matmul_is_compute_bound_above_240_tokens():
    """roofline.md, "Matrix multiplication": B > 1.97e14 / 8.2e11 = 240, where B is much less than D and F."""
    helper = MeshShardingHelper([8], ['X'])
    for batch, bound in [(200, 'hbm'), (300, 'compute')]:
        plan = helper.plan(lambda x, w: x @ w, array(batch, 16384), array(16384, 16384))
        assert plan.roofline(V5E).bottleneck == bound


def test_seconds_of_computing():
    """roofline.md, "Where Does the Time Go?": 1e12 FLOPs take 1.1 ms on a v6e."""
    plan = MeshShardingHelper([8], ['X']).plan(lambda x: x, array(8))
    assert dataclasses.replace(plan, flops=10**12).roofline(V6E).compute == pytest.approx(1.1e-3, rel=0.02)


def test_gathering_in_a_node_of_gpus():
    """gpus.md, Quiz 2, Question 3 [AllGather cost]: bf16[4096, 65536], 8 GPUs of 450 GB/s: 1.04 ms."""
    node = Hardware('a node of 8', torus_axes=0, ici_bytes_per_second=450e9)
    route = route_of([DevicePosition(0)] * 8, torus_of([DevicePosition(0)] * 8, node), 'X')
    times = collective_seconds('all-gather', 4096 * 65536 * BF16, route, node, 1)
    assert times.ici == pytest.approx(1.04e-3, rel=0.01)


def test_the_days_of_a_training_run():
    """applied-training.md, "Counting Parameters and FLOPs": 6.3e24 FLOPs at 40 % of a pod: 44 days."""
    peak = 8960 * V5P.flops_per_second
    roofline = Roofline(V5P, 8960, peak, 44 * 86400.0, 0.0, (), model_flops=int(6.3e24))
    assert roofline.mfu == pytest.approx(0.4, rel=0.02)


# --- Programs, good and bad -----------------------------------------------------------------------

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
TORUS = {'fsdp': 4, 'tp': 2}
LAYERS, SIZE, ROWS = 4, 1024, 65536


def train(w, x):
    def loss(w):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return (jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2).sum()

    return w - jax.grad(loss)(w).astype(w.dtype)


def bound_of(weights, rows):
    step = HELPER.sjit(train, in_shardings=(weights, rows), out_shardings=weights, donate_argnums=0)
    plan = HELPER.plan(step, array(LAYERS, SIZE, SIZE), array(ROWS, SIZE))
    return plan.roofline(dataclasses.replace(RINGS, ring_multiple=2), torus=TORUS)


@pytest.mark.slow
def test_good_shardings_rank_above_bad_ones():
    good = bound_of(FSDPShardingRule('fsdp', min_fsdp_size=1).stacked(), P('fsdp'))
    split = bound_of(P(None, None, 'tp'), P('fsdp'))
    alike = bound_of(P(), P('fsdp'))
    alone = bound_of(P(), P())
    assert good.exactness is Exactness.EXACT
    # All devices along an unused mesh axis compute the same.
    assert good.compute == pytest.approx(alike.compute)
    assert split.compute == pytest.approx(good.compute / 2)
    assert alone.compute == pytest.approx(4 * good.compute)
    assert good.step_seconds.serial < alone.step_seconds.serial
    assert good.bottleneck == alone.bottleneck == 'compute'
    assert split.parts['ici:tp'] > 2 * good.parts['ici:fsdp']


def test_mesh_axes_that_share_links_add_up():
    """Two mesh axes on one ring, and one mesh axis that uses the entire ring."""
    rows = (
        Communication('ici', ('tp',), (TorusSegment(0, 4, False),), 3.0, 3.0),
        Communication('ici', ('fsdp',), (TorusSegment(0, 4, True, 4), TorusSegment(1, 4, True)), 2.0, 2.0),
        Communication('ici', ('fsdp', 'tp'), (TorusSegment(0, 16, True),), 1.0, 1.0),
        Communication('dcn', ('data',), (), 4.0, 4.0),
    )
    roofline = Roofline(V5P, 64, 1e15, 5.0, 1.0, rows)
    assert roofline.bottleneck == 'ici:tp'
    assert roofline.step_seconds == (6.0, 16.0)
    names = ['compute', 'hbm', 'ici:tp', 'ici:fsdp', 'ici:fsdp+tp', 'dcn:data']
    assert roofline.parts == dict(zip(names, [5.0, 1.0, 3.0, 2.0, 1.0, 4.0], strict=True))
    assert dataclasses.replace(roofline, communication=rows[1:]).bottleneck == 'compute'
    assert dataclasses.replace(roofline, communication=(*rows[3:], *rows[3:])).bottleneck == 'dcn:data'


def test_an_all_reduce_whose_result_is_sharded():
    def step(x, y):
        return x.T @ y

    fun = ALONG.sjit(step, in_shardings=P('X'), out_shardings=P('X'))
    plan = ALONG.plan(fun, array(8192, 4096), array(8192, 4096))
    assert [(row.kind, row.scattered) for row in plan.collectives] == [('all-reduce', True)]
    assert plan.to_dict()['collectives'][0]['scattered'] is True
    assert '\nall-reduce, scattered  X ' in str(plan)
    assert plan.roofline(RINGS, torus={'X': 8}).parts['ici:X'] == pytest.approx(4096**2 * BF16 / 1.8e11)
    replicated = ALONG.plan(
        ALONG.sjit(step, in_shardings=P('X'), out_shardings=P()), *(array(8192, 4096),) * 2
    )
    assert [(row.kind, row.scattered) for row in replicated.collectives] == [('all-reduce', False)]
    assert replicated.roofline(RINGS, torus={'X': 8}).parts['ici:X'] == pytest.approx(
        2 * 4096**2 * BF16 / 1.8e11
    )


def test_groups_that_are_a_part_of_an_axis():
    """Pairs along an axis of eight, at a distance of two, which share links with other pairs."""

    def block(x):
        return jax.lax.psum(x, 'X', axis_index_groups=[[0, 2], [1, 3], [4, 6], [5, 7]])

    fun = jax.jit(ALONG.shard_map(block, P('X'), P('X'), check_vma=False))
    plan = ALONG.plan(fun, array(8 * 4096, 4096, dtype=jnp.float32))
    [row] = plan.collectives
    assert (row.axes, row.group, row.replica_group) == (('X',), 2, (0, 2))
    assert plan.to_dict()['collectives'][0]['replica_group'] == [0, 2]
    [communication] = plan.roofline(RINGS, torus={'X': 8}).communication
    assert communication.segments == (TorusSegment(0, 2, ring=False, stride=2),)
    assert communication.seconds == pytest.approx(2 * (4096 * 4096 * 4 / 2) * 2 / 9e10)


def test_slices_of_a_plan():
    fun = HELPER.sjit(lambda x: x.sum(0), in_shardings=P('fsdp', 'tp'))
    roofline = HELPER.plan(fun, array(64, 4096, dtype=jnp.float32)).roofline('v5p', torus={'tp': 2})
    assert roofline.bottleneck == 'dcn:fsdp'
    assert roofline.parts['dcn:fsdp'] == pytest.approx(2 * (4096 / 2 * 4) * 3 / 4 / 6.25e9)


# --- Reading it -----------------------------------------------------------------------------------


def test_text():
    roofline = Roofline(
        *(V5P, 64, 1e15, 0.5, 0.25),
        (
            Communication(
                'ici', ('fsdp', 'tp'), (TorusSegment(0, 4, True), TorusSegment(1, 2, False, 2)), 0.75, 0.75
            ),
            Communication('dcn', ('data',), (), 0.001, 0.001),
            Communication(
                'ici', ('fsdp', 'tp'), (TorusSegment(0, 2, False),), 0.0, 0.0
            ),  # on some of the axes
        ),
        model_flops=3 * 10**14,
        exactness=Exactness.AT_LEAST,
    )
    assert str(roofline).splitlines() == [
        'one call on 64 devices of v5p (at least): at least 750 ms, 1,500 ms if nothing overlaps',
        'bound by ici:fsdp+tp; MFU at most 40.0%: the model needs 300 TFLOPs',
        '  compute       500 ms',
        '  hbm           250 ms',
        '  ici:fsdp+tp   750 ms  ring of 4 along x and line of 2 along y, 2 links apart',
        '  dcn:data     1.00 ms',
    ]


def test_more_than_the_peak():
    """The model counts all pairs of attention; a kernel with a causal mask computes half of them."""
    roofline = Roofline(V5P, 8, 1e15, 1.0, 0.5, (), model_flops=11 * 10**14)
    assert str(roofline).splitlines()[1] == (
        'bound by compute; MFU at most 110.0%: the model needs 1.10 PFLOPs, more than the program computes: '
        'attention may skip what a mask hides'
    )


def test_model_flops():
    plan = fsdp(8)
    assert plan.model_flops == plan.flops  # no gradient, and nothing recomputed
    unknown = dataclasses.replace(plan, model_flops=None)
    assert unknown.roofline(RINGS, torus={'X': 8}).mfu is None
    overridden = plan.with_model_flops(1e9)
    assert overridden.model_flops == 10**9
    roofline = overridden.roofline(RINGS, torus={'X': 8})
    assert roofline.mfu == pytest.approx(1e9 / (8 * 4.59e14 * roofline.step_seconds.overlapped))
    assert overridden.to_dict()['model_flops'] == 10**9
    for wrong in (-1, '1e9', float('nan')):
        with pytest.raises(PlanError) as error:
            plan.with_model_flops(wrong)
        assert str(error.value) == f'model_flops has to be a positive number, got {wrong!r}'


def test_compute_time_with_kernels():
    """The executed FLOPs count; those of kernels are only known from the function."""
    plan = fsdp(8)
    share = plan.flops // 8

    def seconds(**work):
        plan_ = dataclasses.replace(plan, device_cost=DeviceCost(**work))
        return plan_.roofline(RINGS, torus={'X': 8}).compute

    assert seconds(flops=share) == seconds() == pytest.approx(share / 4.59e14)
    assert seconds(flops=share // 2) == pytest.approx(share / 4.59e14 / 2)
    assert (
        seconds(flops=2 * share) == seconds(flops=2 * share, kernels=1) == pytest.approx(2 * share / 4.59e14)
    )
    assert seconds(flops=share // 2, kernels=1) == seconds()


def test_missing_specs_and_positions(snapshot):
    plan = fsdp(8)
    with pytest.raises(PlanError) as error:
        plan.roofline()
    assert str(error.value).startswith("the specs of 'cpu' devices are unknown: pass hardware=..., ")
    with snapshot.raises(PlanError):
        plan.roofline('v5p')
    with snapshot.raises(PlanError):
        plan.roofline(Hardware('mine', flops_per_second=1e14))


@pytest.mark.medium
def test_devices_on_a_switch():
    hardware = Hardware(
        *('mine', 1e14, 1e12, None, 1e11),
        torus_axes=0,
    )
    roofline = fsdp(8).roofline(hardware)
    assert roofline.parts['ici:X'] == pytest.approx(2 * BF16 * WIDTH * HIDDEN * 7 / 8 / 1e11)
    # Programs without communication need no network.
    alone = ALONG.plan(lambda x: x @ x, array(64, 64)).roofline(Hardware('mine', 1e14, 1e12))
    assert alone.communication == ()
    assert alone.bottleneck == 'hbm'


# --- Reading programs -----------------------------------------------------------------------------

PROGRAM = """HloModule jit_f, num_partitions=8

ENTRY %main (p: bf16[64,16]) -> bf16[64,64] {
  %p = bf16[64,16]{1,0} parameter(0)
  %a = bf16[64,64]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
  %b = bf16[64,64]{1,0} all-gather(%p), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
  %c = bf16[256,16]{1,0} all-gather(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %d = bf16[64,32]{1,0} all-gather(%p), channel_id=4, replica_groups=[4,2]<=[8], dimensions={1}
  ROOT %dot = bf16[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_gathers_that_are_written_twice_count_once():
    module = parse(PROGRAM)
    rows = collectives(module, {'fsdp': 4, 'tp': 2})
    gathers = [(row.axes, row.count, row.bytes) for row in rows]
    assert gathers == [(('fsdp',), 2, 8192), (('tp',), 1, 4096)]  # along fsdp, in each of two dimensions
    flops = 2 * 64**3
    moved = 3 * 64 * 64 * 2
    scopes = (ScopeCost('', 'other', flops, moved),)
    work = DeviceCost(
        flops, moved, by_phase={'other': flops}, by_scope=scopes, bytes_by_phase={'other': moved}
    )
    assert device_cost_of(module) == work
