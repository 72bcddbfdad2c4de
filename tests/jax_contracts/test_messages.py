"""Tests that `scalax/_jax/error_texts` recognizes the messages of JAX errors."""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._core.mesh.topologies import topology_devices
from scalax._jax import error_texts
from tests.support.contracts import contract

NO_CLUSTER = """
import jax
from scalax._jax import error_texts
try:
    jax.distributed.initialize()
except ValueError as error:
    print(error_texts.lacks_cluster(error))
"""


@pytest.mark.medium
def test_message_without_a_cluster() -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if not re.match('JAX_COORD|SLURM|OMPI|TPU|K8S', name)
    }
    command = [sys.executable, '-c', NO_CLUSTER]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    with contract('says that the coordinator "must be defined"', 'to run alone'):
        assert done.stdout.strip() == 'True', done.stdout + done.stderr


def test_message_of_a_late_initialize() -> None:
    assert jax.devices()
    with contract('says that jax.distributed.initialize "must be called before"', 'to run alone'):
        with pytest.raises(RuntimeError) as caught:
            jax.distributed.initialize('localhost:1', 1, 0)
        assert error_texts.is_late(caught.value)


def test_message_of_an_unknown_compiler_option() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(np.ones(3))
    with contract('names the compile option that it does not know', 'to say whose option it is'):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            lowered.compile(compiler_options={'xla_no_such_option': True})
        assert error_texts.unknown_option(caught.value) == 'xla_no_such_option'


INDIVISIBLE = {
    'a type': lambda sharding: jax.jit(lambda x: jax.sharding.reshard(x, sharding)).lower(np.ones(9)),
    'an argument': lambda sharding: jax.jit(lambda x: x, in_shardings=sharding).lower(np.ones(9)),
    'an output': lambda sharding: jax.jit(lambda x: x, out_shardings=sharding).lower(np.ones(9)),
    'a slice': lambda sharding: jax.jit(lambda x: x[:9]).lower(
        jax.ShapeDtypeStruct((16,), 'float32', sharding=sharding)
    ),
}


@pytest.mark.parametrize('case', INDIVISIBLE)
def test_message_of_an_indivisible_dimension(case: str) -> None:
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Explicit,))
    with contract(
        f'says "divide" or "divisible" of {case} that does not', 'to rule candidates of a search out'
    ):
        with pytest.raises(Exception) as caught:
            INDIVISIBLE[case](NamedSharding(mesh, P('x')))
        assert error_texts.is_indivisible(caught.value)


@pytest.fixture(scope='module')
def tpu() -> Mesh:
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('the TPU compiler is not installed')
    return Mesh(np.array(topology_devices('v5e:2x4', 1)), ('x',))


def test_message_of_a_program_that_is_too_large(tpu: Mesh) -> None:
    large = jax.ShapeDtypeStruct((2**36,), 'float32', sharding=NamedSharding(tpu, P('x')))
    lowered = jax.jit(lambda x: x + 1).lower(large)
    with contract('says RESOURCE_EXHAUSTED of programs that do not fit', 'to plan them all the same'):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            lowered.compile()
        assert error_texts.is_out_of_memory(caught.value)


def test_message_of_an_unpartitionable_kernel(tpu: Mesh) -> None:
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    x = jax.ShapeDtypeStruct((64, 128), 'float32', sharding=NamedSharding(tpu, P('x')))
    kernel = pallas.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype))
    with contract('raises NotImplementedError of kernels to partition', 'to rule candidates of a search out'):
        with pytest.raises(NotImplementedError) as caught:
            jax.jit(kernel).lower(x)
        assert error_texts.is_unpartitioned(caught.value)


def test_message_of_a_compiler_without_custom_partitioning(tpu: Mesh) -> None:
    @custom_partitioning
    def partitioned(x):
        return x + 1

    partitioned.def_partition(
        lambda mesh, args, result: (mesh, lambda x: x + 1, args[0].sharding, (args[0].sharding,)),
        sharding_rule='i -> i',
    )
    x = jax.ShapeDtypeStruct((16,), 'float32', sharding=NamedSharding(tpu, P('x')))
    lowered = jax.jit(partitioned).lower(x)
    with contract('names CustomSPMDPartitioning where a compiler does not know it', 'to say what helps'):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            lowered.compile()
        assert error_texts.lacks_custom_partitioning(caught.value)


@pytest.mark.parametrize('text', ['mismatched PJRT API version 0.1', 'libtpu version 1 is too old'])
def test_messages_of_an_incompatible_libtpu(text: str) -> None:
    # JAX and libtpu raise these errors when they are loaded; the texts come from JAX 0.10 to 0.12.
    assert error_texts.is_wrong_libtpu(RuntimeError(text))
    assert not error_texts.is_wrong_libtpu(RuntimeError('no such topology'))


def test_message_of_a_repeated_mesh_axis() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'tp'))
    with contract(
        'says that a mesh axis is for "at most one positional dimension" and has "duplicate entries"',
        'to enter the mapping of haliax where haliax can apply it',
    ):
        with pytest.raises(Exception, match='data') as caught:
            NamedSharding(mesh, P('data', 'data'))
        assert error_texts.repeats_a_mesh_axis(caught.value)
        with pytest.raises(ValueError, match='pod') as caught:
            NamedSharding(mesh, P('pod'))
        assert not error_texts.repeats_a_mesh_axis(caught.value)
