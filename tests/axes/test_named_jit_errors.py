"""Named axes: errors about invalid calls and options of compiled functions."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalax.axes import fsdp, named_jit, shard
from scalax.errors import ArgumentError, MeshError, RuleError, ShardingError
from scalax.sharding import MeshShardingHelper

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of the pre-release, while it is imported
    hax = pytest.importorskip('haliax', reason='haliax is not installed')

PARAMS = {'embed': 'data', 'mlp': 'tp'}
COMPUTE = {'batch': 'data', 'mlp': 'tp'}


@pytest.fixture
def helper():
    return MeshShardingHelper([4, 2], ['data', 'tp'])


def exactly(message):
    # JAX adds lines to an error that a trace raises.
    return f'^{re.escape(message)}($|\n-----)'


OF_FSDP = (
    'What to do: call fsdp(fn, parameter_mapping, compute_mapping), or decorate a function with '
    '@fsdp(parameter_mapping, compute_mapping); options of named_jit may follow by name.'
)


@pytest.mark.parametrize(
    ('bad', 'message'),
    [
        (lambda: fsdp(PARAMS), f'fsdp got no compute_mapping\n{OF_FSDP}'),
        (lambda: fsdp(lambda x: x), f'fsdp got no parameter_mapping, no compute_mapping\n{OF_FSDP}'),
        (lambda: fsdp(lambda x: x, PARAMS, COMPUTE, 3), f'fsdp got 4 positional arguments\n{OF_FSDP}'),
        (lambda: fsdp(3, PARAMS, COMPUTE), f'fsdp got 3 positional arguments\n{OF_FSDP}'),
        (
            lambda: fsdp(lambda x: x, PARAMS, COMPUTE, fn=len, param_mapping=PARAMS),
            f'fsdp got fn twice, parameter_mapping twice\n{OF_FSDP}',
        ),
        (
            lambda: fsdp(PARAMS, COMPUTE, in_axis_resources=PARAMS, axis_resources=COMPUTE),
            'fsdp got axis_resources, which compute_mapping sets, in_axis_resources, which '
            f'parameter_mapping sets\n{OF_FSDP}',
        ),
        (
            lambda: named_jit(PARAMS),
            'named_jit takes a function first, got dict: a mapping is axis_resources={...}',
        ),
        (
            lambda: named_jit(lambda x: x)(np.ones(2), {'a': bytearray(b'')}),
            '<lambda> got leaves that are not arrays and cannot be hashed:\n  args/1/a: bytearray\n'
            'What to do: everything but arrays is part of the compiled program: pass something immutable (a '
            'tuple, a frozen dataclass), or a pytree of arrays.',
        ),
        (
            lambda: named_jit(lambda x: {'x': x, 'seen': {1}})(np.ones(2)),
            'the output of <lambda> has leaves that are not arrays and cannot be hashed:\n  seen: set\n'
            'What to do: everything but arrays is part of the compiled program: return something immutable, '
            'or a pytree of arrays.',
        ),
        *[
            (
                lambda option=option: named_jit(lambda x: x, PARAMS, **{option: 0}),
                f'named_jit does not take {option}\nWhat to do: compile with helper.sjit, which does. In '
                'named_jit, everything but arrays is static, and donate_args and donate_kwargs choose what '
                'is donated.',
            )
            for option in ('batch_argnums', 'batch_argnames', 'static_argnums', 'donate_argnames')
        ],
        *[
            (
                lambda fn=fn, option=option: named_jit(fn, **{option: 0}),
                f'named_jit has no option {option!r} (did you mean {near!r}?)',
            )
            for fn in (None, abs)
            for option, near in (('in_axis_resource', 'in_axis_resources'), ('keep_unusd', 'keep_unused'))
        ],
    ],
)
def test_invalid_calls(bad, message):
    with pytest.raises(ArgumentError, match=exactly(message)):
        bad()


def test_a_mapping_needs_a_mesh():
    message = (
        'same has a mapping or a rule, but no mesh is active: call it inside `with helper.get_context():`, '
        'or give named_jit mesh=helper.mesh'
    )

    def same(x):
        return x

    with pytest.raises(MeshError, match=exactly(message)):
        named_jit(same, PARAMS)(np.ones(2))


def test_resources_of_another_form(helper):
    message = "named_jit: out_axis_resources is a mapping or any rule, got P('data',)"
    with pytest.raises(RuleError, match=exactly(message)):
        named_jit(lambda x: x, out_axis_resources=P('data'), mesh=helper)


def test_a_mesh_without_devices_serves_inside_of_jit_only(helper):
    compiled = named_jit(lambda x: shard(x, 'batch mlp'), COMPUTE, mesh=helper.mesh.abstract_mesh)
    with pytest.raises(MeshError, match=r'^a call of <lambda> needs devices to run on'):
        compiled(jnp.ones((8, 8)))
    with pytest.raises(ValueError, match='lowering_platforms'):  # of JAX
        compiled.lower(jnp.ones((8, 8)))
    with jax.set_mesh(helper.mesh):
        assert jax.jit(compiled)(jnp.ones((8, 8))).sharding.spec == P('data', 'tp')


def test_donated_keywords_are_arguments_of_the_function():
    def step(x, *, state=None):
        return x if state is None else x + state

    text = "donate_kwargs of step: there is no argument 'stat' (did you mean 'state'?)"
    with pytest.raises(ArgumentError, match=exactly(text)):
        named_jit(step, donate_kwargs={'x': True, 'stat': True})
    named_jit(lambda **keywords: keywords, donate_kwargs={'stat': True})  # accepts any name


def test_donated_keywords_are_arguments_of_the_method():
    class Model:
        def step(self, *, state):
            return state

    text = "donate_kwargs of step: there is no argument 'stat' (did you mean 'state'?)"
    with pytest.raises(ArgumentError, match=exactly(text)):
        named_jit(Model().step, donate_kwargs={'stat': True})


def test_shapes_are_for_lower(snapshot):
    def step(state, x):
        return state['w'] + x

    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    compiled = named_jit(step)
    with snapshot.raises(ArgumentError):
        compiled({'w': struct}, x=struct)
    assert compiled.lower({'w': struct}, x=struct).out_info[0].shape == (8,)
    assert jax.eval_shape(compiled, {'w': struct}, struct).shape == (8,)


@pytest.mark.parametrize('value', [(0,), 0, 1, 'x', {'x': True}], ids=str)
def test_donations_are_booleans_or_functions(value):
    message = (
        f'donate_args of <lambda> is True, or a prefix of the args with booleans or functions; got {value!r}.'
    )
    with pytest.raises(
        ArgumentError, match=f'^{re.escape(message)} (Positions and names are for jax.jit.$|JAX)'
    ):
        named_jit(lambda x: x, donate_args=value)(np.ones(2))


def test_donations_of_another_form():
    with pytest.raises(
        ArgumentError,
        match=r'^donate_args of <lambda> is True, or a prefix of the args with booleans or functions',
    ):
        named_jit(lambda x: x, donate_args=(True, True))(np.ones(2))


def test_arrays_that_do_not_fit_are_named(helper):
    with pytest.raises(ShardingError, match=r"'args/0/array'|args/0"):
        named_jit(lambda x: x, in_axis_resources={'embed': ('data', 'tp')}, mesh=helper)(
            [hax.ones((hax.Axis('embed', 6),))]
        )
