"""Error messages of `helper.plan`, compared in full."""

import signal
import threading

import jax
import pytest

from scalax._planning.compiler.compilation import compile_lowered
from scalax._planning.time.schedule import COST_MODEL_OPTION
from scalax.errors import ArgumentError, MeshError, PlanError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_compiler

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
X = jax.ShapeDtypeStruct((8, 8), 'float32')


def test_the_compiler_error_comes_before_the_advice(snapshot):
    def step(x):
        return jax.ffi.ffi_call('nobody_knows_this', X)(x)

    with pytest.raises(PlanError) as raised:
        HELPER.plan(HELPER.sjit(step, in_shardings=P('fsdp')), X)
    reason, context = str(raised.value).split('\n')
    assert 'nobody_knows_this' in reason
    snapshot(context)
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_ctrl_c_interrupts_a_compiler_at_once():
    """Python does not receive Ctrl-C while a compiler runs in its main thread."""
    released, threads = threading.Event(), []

    class Endless:
        def compile(self, compiler_options):
            threads.append(threading.current_thread())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            released.wait(200)

    with pytest.raises(KeyboardInterrupt):
        compile_lowered(Endless(), 'cpu')
    released.set()
    assert threads[0] is not threading.main_thread()
    threads[0].join(200)


def test_a_compiler_sees_the_settings_of_its_caller():
    """It calls back into Python for custom_partitioning, whose tracing depends on settings."""
    seen = []

    class Records:
        def compile(self, compiler_options):
            seen.append((jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision))
            seen.append((jax.config.jax_numpy_rank_promotion, jax.config.jax_threefry_partitionable))
            raise jax.errors.JaxRuntimeError('no program')

    with (
        jax.enable_x64(True),
        jax.default_matmul_precision('float32'),
        jax.numpy_rank_promotion('raise'),
        jax.threefry_partitionable(False),
        pytest.raises(jax.errors.JaxRuntimeError, match='no program'),
    ):
        compile_lowered(Records(), 'cpu')
    assert seen == [(True, 'float32'), ('raise', False)]


@pytest.mark.parametrize('platform', ['gpu', 'cpu'])
def test_a_gpu_compiler_without_kernel_models_is_retried_without_them(platform):
    """It compiles again, and the second error is raised."""
    attempts = []

    class HasNoModels:
        def compile(self, compiler_options):
            attempts.append(COST_MODEL_OPTION in compiler_options)
            raise jax.errors.JaxRuntimeError(f'asked {len(attempts)} times')

    times = 2 if platform == 'gpu' else 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=f'asked {times} times'):
        compile_lowered(HasNoModels(), platform)
    assert attempts == [True, False][-times:]


def test_a_function_that_makes_a_step():
    def make_step(helper):
        raise AssertionError(helper)

    with pytest.raises(TypeError, match=r"^make_step\(\): missing a required argument: 'helper'") as raised:
        HELPER.plan(make_step)
    assert raised.value.__notes__ == [
        'Is make_step a function that returns a step and its arguments? Plan these: '
        'helper.plan(*make_step(helper)); one that takes no helper is for autoshard(*make_step(), ...)'
    ]


def test_a_function_that_needs_values():
    def step(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
        HELPER.plan(step, X)
    assert (
        "'step' cannot be planned, because a plan is made without values. Make the value a static argument "
        '(static_argnames), or use jax.lax.cond or jnp.where'
    ) in raised.value.__notes__


def test_arguments_without_shapes(snapshot):
    with snapshot.raises(ArgumentError):
        HELPER.plan(lambda batch: batch, {'rows': object(), 'names': 'text', 'x': X})


def test_errors_name_the_source_of_an_option(snapshot):
    def step(x, quick=False):
        return x

    with snapshot.raises(ArgumentError):
        HELPER.plan(step, X, quick=True)
    assert HELPER.plan(step, X).name == 'step'


@tpu_compiler.needed
@pytest.mark.parametrize(
    ('topology', 'dims'),
    [
        ('v5e:2x4', [3, -1]),
        ('v5e:2x4', [16, 2]),
    ],
)
def test_a_mesh_that_a_slice_cannot_hold(topology, dims, snapshot):
    with snapshot.raises(MeshError):
        MeshShardingHelper.from_topology(topology, dims, ['fsdp', 'tp'])


@tpu_compiler.needed
def test_a_mesh_that_does_not_cover_entire_torus_axes():
    with pytest.raises(MeshError) as raised:
        MeshShardingHelper.from_topology('v5p:4x4x4', [8, 8], ['fsdp', 'tp'])
    assert str(raised.value).startswith(
        'mesh (8, 8) does not map onto entire physical axes of these devices; pass mesh_axis_splitting=True '
        'to let one physical axis serve several mesh axes (it may cost bandwidth). JAX reports: '
    )
