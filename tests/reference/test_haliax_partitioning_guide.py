"""The guide of haliax to partitioning, item by item, on `scalax.axes`.

The document is https://haliax.readthedocs.io/en/latest/partitioning/. A test is named after the heading of
the document that it covers, and after the function. It calls every function, parameter and example that the
document names, and asserts the result that the document promises.

Where haliax is installed, arrays are its NamedArrays, and each call runs on haliax side by side. Where it is
not, arrays are plain, and rules name their dimensions. Where scalax differs on purpose, the test asserts what
scalax does, and `stated` asserts that docs/axes.md says so under "For users of haliax".
"""

import collections.abc
import contextlib
import dataclasses
import functools
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax import axes
from scalax.errors import ArgumentError, MeshError, UnshardedWarning
from scalax.sharding import LogicalAxisShardingRule, MeshShardingHelper
from tests.support import ROOT

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # haliax uses names that JAX has deprecated
    try:
        import haliax as hax
    except ImportError:
        hax = None

# haliax reads a name that JAX has deprecated in its calls, too.
pytestmark = pytest.mark.filterwarnings('ignore:jax.interpreters.pxla:DeprecationWarning')
needs_haliax = pytest.mark.skipif(hax is None, reason='haliax is not installed')

if hax is None:
    HALIAX = None

    @dataclasses.dataclass(frozen=True)
    class Axis:
        """The stand-in for haliax's Axis, with what scalax reads of it."""

        name: str
        size: int

        def resize(self, size):
            return Axis(self.name, size)
else:
    # What the document calls haliax.shard and haliax.partitioning.axis_mapping, as one module.
    HALIAX = types.SimpleNamespace(**{**vars(hax), **vars(hax.partitioning)})
    Axis = hax.Axis

BATCH, SEQLEN = Axis('batch', 32), Axis('seqlen', 16)
API = [
    pytest.param(axes, id='scalax'),
    pytest.param(HALIAX, id='haliax', marks=needs_haliax),
]


@pytest.fixture
def mesh():
    """The mesh of the document, of eight devices: jnp.array takes no devices, so it is made with NumPy."""
    return Mesh(np.array(jax.devices()).reshape((-1, 2)), ('data', 'model'))


def resources(mapping):
    """A mapping; where haliax is not installed, a rule that also names the dimensions of plain arrays."""
    if hax is not None:
        return mapping
    return LogicalAxisShardingRule(mapping, [('', 'batch seqlen')], strict=False)


def zeros():
    array = jnp.zeros((BATCH.size, SEQLEN.size), jnp.float32)
    return array if hax is None else hax.named(array, (BATCH, SEQLEN))


def array_of(value):
    return value if isinstance(value, jax.Array) else value.array


def assert_sharded(value, mesh, *spec):
    array = array_of(value)
    assert array.shape == (BATCH.size, SEQLEN.size)
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), 2), array.sharding


def stated(text):
    """Asserts that the section for users of haliax in docs/axes.md has a text."""
    page = (ROOT / 'docs/axes.md').read_text(encoding='utf-8')
    section = ' '.join(page.partition('\n## For users of haliax\n')[2].split())
    assert text in section, f'docs/axes.md does not say: {text}'


def test_every_function_of_the_document_is_public():
    names = (
        'ResourceMapping axis_mapping shard auto_sharded shard_with_axis_mapping named_jit fsdp '
        'round_axis_for_partitioning physical_axis_name physical_axis_size sharding_for_axis'
    )
    assert {*names.split()} <= {*axes.__all__}


# Device Meshes in JAX --------------------------------------------------------------------------------


def test_device_meshes_in_jax(mesh):
    """The mesh and the placement of the document; a helper over that mesh places alike."""
    batch = jnp.zeros((32, 512), dtype=jnp.float32)
    placed = jax.device_put(batch, NamedSharding(mesh, P('data', None)))
    helper = MeshShardingHelper.from_mesh(mesh)
    assert helper.mesh == mesh
    assert helper.shard(batch, P('data', None)).sharding.is_equivalent_to(placed.sharding, 2)
    assert len({str(shard.index) for shard in placed.addressable_shards}) == 4  # each part on two devices


def test_device_meshes_in_jax__with_sharding_constraint(mesh):
    """Inside ``jax.jit`` a constraint states the sharding; `shard` does the same by name."""
    placed = NamedSharding(mesh, P('data', None))
    x = jnp.zeros((32, 16))
    by_spec = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, placed))(x)
    with jax.set_mesh(mesh):
        by_name = jax.jit(lambda x: axes.shard(x, 'batch seqlen', {'batch': 'data'}))(x)
    assert by_name.sharding.is_equivalent_to(by_spec.sharding, 2)


# Haliax Partitioning in a nutshell -------------------------------------------------------------------


@pytest.mark.parametrize('api', API)
def test_haliax_partitioning_in_a_nutshell(mesh, api):
    mapping = resources({'batch': 'data'})
    with jax.set_mesh(mesh):
        assert_sharded(api.shard(zeros(), mapping), mesh, 'data')
        with api.axis_mapping(mapping):
            assert_sharded(api.shard(zeros()), mesh, 'data')
            assert_sharded(api.auto_sharded(zeros()), mesh, 'data')


@pytest.mark.parametrize('mesh_from', ['jax.set_mesh', 'helper', 'helper as mesh'])
def test_haliax_partitioning_in_a_nutshell__the_mesh_of_scalax(mesh, mesh_from):
    helper = MeshShardingHelper.from_mesh(mesh)
    mapping = resources({'batch': 'data'})
    if mesh_from == 'helper as mesh':
        batch = axes.shard(zeros(), mapping, helper)
    else:
        with jax.set_mesh(mesh) if mesh_from == 'jax.set_mesh' else helper.get_context():
            batch = axes.shard(zeros(), mapping)
    assert_sharded(batch, mesh, 'data')
    stated("| the mesh | `jax.set_mesh` | the active helper's, or `jax.set_mesh`, or `mesh=` |")


@pytest.mark.parametrize('api', API)
def test_haliax_partitioning_in_a_nutshell__a_single_api(mesh, api):
    """The same function places arrays outside of ``jax.jit`` and constrains them inside."""
    with jax.set_mesh(mesh), api.axis_mapping(resources({'batch': 'data'})):
        for shard in (api.shard, jax.jit(api.shard)):
            assert_sharded(shard(zeros()), mesh, 'data')


# Axis Mappings ---------------------------------------------------------------------------------------


def test_axis_mappings__resource_mapping():
    """An alias of a dict from names to a mesh axis, or to several."""
    mapping: axes.ResourceMapping = {'batch': 'data', 'seqlen': ('model',)}
    assert axes.ResourceMapping == collections.abc.Mapping[str, str | collections.abc.Sequence[str] | None]
    assert axes.physical_axis_name('batch', mapping) == 'data'


@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('entry', [('data', 'model'), ['data', 'model']], ids=str)
def test_axis_mappings__one_axis_across_several_of_the_mesh(mesh, api, entry):
    with jax.set_mesh(mesh):
        assert_sharded(api.shard(zeros(), resources({'batch': entry})), mesh, ('data', 'model'))


AXIS_MAPPING_FORMS = {
    'positional': (lambda api: api.axis_mapping(resources({'batch': 'data'})), ('data',)),
    'keywords': (lambda api: api.axis_mapping(mapping=resources({'batch': 'data'}), merge=False), ('data',)),
    'replaces': (lambda api: api.axis_mapping(resources({'batch': 'data'})), ('data',)),
    'merge': (
        lambda api: api.axis_mapping(resources({'batch': 'data'}), merge=True),
        ('data', 'model'),
    ),
    'names': (lambda api: api.axis_mapping(resources({}), batch='data'), ('data',)),
    'names override': (lambda api: api.axis_mapping(resources({'batch': 'model'}), batch='data'), ('data',)),
    'names and merge': (
        lambda api: api.axis_mapping(resources({}), merge=True, batch='data'),
        ('data', 'model'),
    ),
    'several mesh axes by name': (
        lambda api: api.axis_mapping(resources({}), batch=('data', 'model')),
        (('data', 'model'),),
    ),
}


@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('form', AXIS_MAPPING_FORMS.values(), ids=AXIS_MAPPING_FORMS)
def test_axis_mappings__axis_mapping(mesh, api, form):
    enter, spec = form
    with jax.set_mesh(mesh), api.axis_mapping(resources({'seqlen': 'model'})):
        with enter(api):
            assert_sharded(api.auto_sharded(zeros()), mesh, *spec)
        assert api.physical_axis_name('seqlen') == 'model'  # the outer mapping is active again
    assert api.physical_axis_name('seqlen') is None


@pytest.mark.parametrize('api', API)
def test_axis_mappings__axis_mapping_for_the_duration_of_a_function(api):
    """The context manager is a decorator, too."""

    @api.axis_mapping({'batch': 'data'})
    def function():
        return api.physical_axis_name('batch')

    assert (function(), api.physical_axis_name('batch')) == ('data', None)


@pytest.mark.parametrize('api', API)
def test_axis_mappings__for_the_current_thread(api):
    seen = []
    with api.axis_mapping({'batch': 'data'}):
        thread = threading.Thread(target=lambda: seen.append(api.physical_axis_name('batch')))
        thread.start()
        thread.join(timeout=60)
        seen.append(api.physical_axis_name('batch'))
    assert seen == [None, 'data']


@pytest.mark.parametrize('api', API)
def test_axis_mappings__a_name_in_both_of_a_merge(api):
    with api.axis_mapping({'batch': 'data'}), api.axis_mapping({'batch': 'model'}, merge=True):
        assert api.physical_axis_name('batch') == ('model' if api is axes else 'data')
    stated(
        '| `axis_mapping(m, merge=True)`, a name in both | the outer mapping wins | the inner mapping wins |'
    )


@pytest.mark.parametrize(
    'mapping', [{'batch': ('pod', 'data')}, {'batch': 'data', 'seqlen': 'data'}], ids=str
)
def test_axis_mappings__mesh_axes_that_cannot_be_used(mesh, mapping):
    with jax.set_mesh(mesh):
        assert_sharded(axes.shard(zeros(), resources(mapping)), mesh, 'data')
        if HALIAX is not None:
            with pytest.raises(Exception, match=r"'pod'|duplicate entries for `data`"):
                HALIAX.shard(zeros(), mapping)
    stated("| a mesh axis that the mesh lacks, or that the array uses already | JAX's error | skipped |")


# Sharding Arrays and PyTrees -------------------------------------------------------------------------

DATA = resources({'batch': 'data'})

MESH_IN_FORCE = {
    'shard(x, mapping)': lambda api, x: api.shard(x, DATA),
    'shard(x, mapping=)': lambda api, x: api.shard(x, mapping=DATA),
    'shard(x=, mapping=)': lambda api, x: api.shard(x=x, mapping=DATA),
    'shard(x) in a context': lambda api, x: in_context(api, lambda: api.shard(x)),
    'shard(x, None) in a context': lambda api, x: in_context(api, lambda: api.shard(x, None, None)),
    'auto_sharded(x)': lambda api, x: in_context(api, lambda: api.auto_sharded(x)),
    'auto_sharded(x=)': lambda api, x: in_context(api, lambda: api.auto_sharded(x=x)),
    'shard_with_axis_mapping(x, mapping)': lambda api, x: api.shard_with_axis_mapping(x, DATA),
    'shard_with_axis_mapping(x=, mapping=)': lambda api, x: api.shard_with_axis_mapping(x=x, mapping=DATA),
    'shard_with_axis_mapping(x, None) in a context': lambda api, x: in_context(
        api, lambda: api.shard_with_axis_mapping(x, None)
    ),
}
MESH_BY_ARGUMENT = {
    'shard(x, mapping, mesh)': lambda api, x, mesh: api.shard(x, DATA, mesh),
    'shard(x, mapping, mesh=)': lambda api, x, mesh: api.shard(x, DATA, mesh=mesh),
    'shard(x=, mapping=, mesh=)': lambda api, x, mesh: api.shard(x=x, mapping=DATA, mesh=mesh),
    'shard(x, None, mesh)': lambda api, x, mesh: in_context(api, lambda: api.shard(x, None, mesh)),
    'shard(x, mesh=)': lambda api, x, mesh: in_context(api, lambda: api.shard(x, mesh=mesh)),
    'auto_sharded(x, mesh)': lambda api, x, mesh: in_context(api, lambda: api.auto_sharded(x, mesh)),
    'auto_sharded(x=, mesh=)': lambda api, x, mesh: in_context(api, lambda: api.auto_sharded(x=x, mesh=mesh)),
    'shard_with_axis_mapping(x, mapping, mesh)': lambda api, x, mesh: api.shard_with_axis_mapping(
        x, DATA, mesh
    ),
    'shard_with_axis_mapping(x, mapping, mesh=)': lambda api, x, mesh: api.shard_with_axis_mapping(
        x, DATA, mesh=mesh
    ),
}


def in_context(api, call):
    with api.axis_mapping(DATA):
        return call()


@pytest.mark.medium
@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('compiled', [False, True], ids=['outside of jit', 'inside of jit'])
@pytest.mark.parametrize('form', MESH_IN_FORCE.values(), ids=MESH_IN_FORCE)
def test_sharding_arrays_and_pytrees(mesh, api, form, compiled):
    call = functools.partial(form, api)
    with jax.set_mesh(mesh):
        assert_sharded((jax.jit(call) if compiled else call)(zeros()), mesh, 'data')


@pytest.mark.medium
@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('compiled', [False, True], ids=['outside of jit', 'inside of jit'])
@pytest.mark.parametrize('form', MESH_BY_ARGUMENT.values(), ids=MESH_BY_ARGUMENT)
def test_sharding_arrays_and_pytrees__mesh_by_argument(mesh, api, form, compiled):
    call = functools.partial(form, api, mesh=mesh)
    # Inside of jit haliax needs a mesh in force beside its argument.
    with jax.set_mesh(mesh) if compiled and api is not axes else contextlib.nullcontext():
        assert_sharded((jax.jit(call) if compiled else call)(zeros()), mesh, 'data')
    stated('| `mesh=` inside of `jit`, without a mesh in force | does nothing | constrains |')


@needs_haliax
@pytest.mark.parametrize('api', API)
def test_sharding_arrays_and_pytrees__named_arrays_in_a_tree(mesh, api):
    """A tree, such as a module: NamedArrays are sharded, and all other leaves are left alone."""
    plain = jnp.ones(8)
    tree = {'x': zeros(), 'layers': [hax.ones((SEQLEN, BATCH))], 'plain': plain, 'name': 'mlp', 'number': 3}
    with jax.set_mesh(mesh):
        for function in (api.shard, api.shard_with_axis_mapping):
            sharded = function(tree, {'batch': 'data', 'seqlen': 'model'})
            assert_sharded(sharded['x'], mesh, 'data', 'model')
            assert sharded['layers'][0].array.sharding.is_equivalent_to(
                NamedSharding(mesh, P('model', 'data')), 2
            )
            assert sharded['plain'] is plain
            assert (sharded['name'], sharded['number']) == ('mlp', 3)


@pytest.mark.parametrize('function', ['shard', 'shard_with_axis_mapping'])
@pytest.mark.parametrize('missing', ['mapping', 'mesh'])
def test_sharding_arrays_and_pytrees__shard_warns_and_does_nothing(mesh, function, missing):
    x = zeros()
    call = functools.partial(getattr(axes, function), x, DATA if missing == 'mesh' else None)
    with jax.set_mesh(mesh) if missing == 'mapping' else warnings.catch_warnings():
        with pytest.warns(UnshardedWarning, match=f'no (axis )?{missing} is active'):
            assert call() is x
        if HALIAX is not None:
            with pytest.warns(RuntimeWarning, match='Not sharding'):
                assert HALIAX.shard(x, DATA if missing == 'mesh' else None) is x
    stated(
        '| `shard` without a mapping or a mesh | a RuntimeWarning outside of `jit` | an `UnshardedWarning`, '
        'also inside |'
    )


def test_sharding_arrays_and_pytrees__shard_warns_of_arrays_without_names(mesh):
    x = jnp.ones((32, 16))
    with jax.set_mesh(mesh):
        with pytest.warns(UnshardedWarning, match='no array names its dimensions'):
            assert axes.shard(x, {'batch': 'data'}) is x
        assert_sharded(axes.shard(x, 'batch seqlen', {'batch': 'data'}), mesh, 'data')
        if HALIAX is not None:
            assert HALIAX.shard(x, {'batch': 'data'}) is x
    stated(
        "| `shard` of arrays without names | does nothing | does nothing and warns, unless `shard(x, 'batch "
        "embed')` names them |"
    )


@pytest.mark.parametrize('api', API)
def test_sharding_arrays_and_pytrees__auto_sharded_does_not_warn(mesh, api):
    x = zeros()
    with jax.set_mesh(mesh):
        assert api.auto_sharded(x) is x  # no mapping; a warning would be an error here
    with api.axis_mapping(DATA):
        if api is axes:
            assert api.auto_sharded(x) is x
        else:
            with pytest.warns(RuntimeWarning, match='No mesh found'):
                api.auto_sharded(x)
    stated('| `auto_sharded` without a mesh | a RuntimeWarning outside of `jit` | no warning |')


# named_jit and friends -------------------------------------------------------------------------------


def plus_one(x):
    """Adds one."""
    return x + 1


NAMED_JIT_FORMS = {
    'fn, mapping': lambda api: api.named_jit(plus_one, DATA),
    'fn, axis_resources=': lambda api: api.named_jit(plus_one, axis_resources=DATA),
    'fn=, axis_resources=': lambda api: api.named_jit(fn=plus_one, axis_resources=DATA),
    'decorator': lambda api: api.named_jit(axis_resources=DATA)(plus_one),
    'decorator with all options': lambda api: api.named_jit(
        axis_resources={},
        in_axis_resources=DATA,
        out_axis_resources=DATA,
        donate_args=None,
        donate_kwargs=None,
    )(plus_one),
    'in_axis_resources=': lambda api: api.named_jit(
        plus_one, in_axis_resources=DATA, out_axis_resources=DATA
    ),
    'out_axis_resources=': lambda api: api.named_jit(plus_one, {}, out_axis_resources=DATA),
    'keep_unused=, inline=': lambda api: api.named_jit(plus_one, DATA, keep_unused=True, inline=True),
    'fsdp(fn, p, c)': lambda api: api.fsdp(plus_one, DATA, {}),
    'fsdp(fn=, parameter_mapping=, compute_mapping=)': lambda api: api.fsdp(
        fn=plus_one, parameter_mapping=DATA, compute_mapping={}
    ),
    '@fsdp(p, c)': lambda api: api.fsdp(DATA, {})(plus_one),
    '@fsdp(p, compute_mapping=)': lambda api: api.fsdp(DATA, compute_mapping={})(plus_one),
    '@fsdp(parameter_mapping=, compute_mapping=)': lambda api: api.fsdp(
        parameter_mapping=DATA, compute_mapping={}
    )(plus_one),
}
IN_CONTEXT = {
    'named_jit(fn)': lambda api: api.named_jit(plus_one),
    'named_jit(fn, None)': lambda api: api.named_jit(plus_one, None),
    '@named_jit()': lambda api: api.named_jit()(plus_one),
    '@named_jit(keep_unused=)': lambda api: api.named_jit(keep_unused=True)(plus_one),
}


@pytest.mark.medium
@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('form', NAMED_JIT_FORMS.values(), ids=NAMED_JIT_FORMS)
def test_named_jit_and_friends(mesh, api, form):
    function = form(api)
    assert (function.__name__, function.__doc__) == ('plus_one', 'Adds one.')
    assert function.__wrapped__ is plus_one
    x = zeros()
    with jax.set_mesh(mesh):
        result = function(x)
    assert_sharded(result, mesh, 'data')
    np.testing.assert_array_equal(array_of(result), np.ones((32, 16)))


@pytest.mark.parametrize('api', API)
@pytest.mark.filterwarnings('ignore:backend and device argument:DeprecationWarning')  # of JAX 0.12
def test_named_jit_and_friends__backend(api):
    """JAX takes it where nothing states shardings."""
    result = api.named_jit(plus_one, backend='cpu')(zeros())
    np.testing.assert_array_equal(array_of(result), np.ones((32, 16)))


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__calls_by_name_and_lower(mesh, api):
    function = api.named_jit(plus_one, DATA)
    x = zeros()
    with jax.set_mesh(mesh):
        assert_sharded(function(x=x), mesh, 'data')
        assert isinstance(function.lower(x=x), jax.stages.Lowered)


@pytest.mark.medium
@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('form', IN_CONTEXT.values(), ids=IN_CONTEXT)
def test_named_jit_and_friends__mapping_by_context(mesh, api, form):
    function = form(api)
    with jax.set_mesh(mesh), api.axis_mapping(DATA):
        assert_sharded(function(zeros()), mesh, 'data')


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__axis_resources_are_active_inside(mesh, api):
    @api.named_jit(axis_resources=resources({'batch': 'data'}))
    def function(x):
        seen.append(api.physical_axis_name('batch'))
        return api.shard(x)

    seen = []
    with jax.set_mesh(mesh), api.axis_mapping(resources({'batch': 'model'})):
        assert_sharded(function(zeros()), mesh, 'data')
    assert {*seen} == {'data'}


@pytest.mark.medium
@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__is_very_similar_to(mesh, api):
    """The program that the document gives for named_jit."""
    inputs, outputs, inside = (
        resources(mapping) for mapping in ({'batch': 'model'}, {'seqlen': 'data'}, {'batch': 'data'})
    )

    def function(x):
        return api.shard(x) * 2

    def wrapped(x):
        return api.shard(function(x), outputs)

    with jax.set_mesh(mesh):
        x = api.shard(zeros(), inputs)
        with api.axis_mapping(inside):
            expected = jax.jit(wrapped)(x)
        result = api.named_jit(function, inside, in_axis_resources=inputs, out_axis_resources=outputs)(x)
    assert_sharded(result, mesh, None, 'data')
    assert array_of(result).sharding.is_equivalent_to(array_of(expected).sharding, 2)


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__fsdp_is_equivalent_to(mesh, api):
    """The named_jit that the document gives for fsdp; inside, the mapping of computations is active."""
    stored, computed = resources({'seqlen': 'model'}), resources({'batch': 'data'})
    seen = []

    def function(x):
        seen.append((api.physical_axis_name('batch'), api.physical_axis_name('seqlen')))
        return x * 2

    with jax.set_mesh(mesh):
        x = api.shard(zeros(), stored)
        for compiled in (
            api.fsdp(function, stored, computed),
            api.named_jit(in_axis_resources=stored, out_axis_resources=stored, axis_resources=computed)(
                function
            ),
        ):
            assert_sharded(compiled(x), mesh, None, 'model')
    assert {*seen} == {('data', None)}


def is_matrix(leaf):
    return leaf.ndim == 2


DONATIONS = {
    'none': ({}, [False, False, False]),
    'all by True': ({'donate_args': True}, [True, True, False]),
    'a tuple': ({'donate_args': (True, False)}, [True, False, False]),
    'a list': ({'donate_args': [False, True]}, [False, True, False]),
    'a shorter prefix': ({'donate_args': (True,)}, [True, False, False]),
    'an empty prefix': ({'donate_args': ()}, [False, False, False]),
    'a function': ({'donate_args': (is_matrix,)}, [True, False, False]),
    'two functions': ({'donate_args': (lambda leaf: False, is_matrix)}, [False, True, False]),
    'keywords': ({'donate_kwargs': {'z': True}}, [False, False, True]),
    'keywords by a function': ({'donate_kwargs': {'z': is_matrix}}, [False, False, True]),
    'both': ({'donate_args': (False, True), 'donate_kwargs': {'z': True}}, [False, True, True]),
    'no keywords': ({'donate_args': (True,), 'donate_kwargs': {}}, [True, False, False]),
}


@pytest.mark.medium
@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('donation', DONATIONS.values(), ids=DONATIONS)
def test_named_jit_and_friends__donate_args_and_donate_kwargs(mesh, api, donation):
    options, expected = donation
    with jax.set_mesh(mesh):
        x, y, z = (api.shard(zeros(), DATA) for _ in range(3))
        function = api.named_jit(lambda x, y, *, z: (x + 1, y + 1, z + 1), DATA, **options)
        for result in function(x, y, z=z):
            np.testing.assert_array_equal(array_of(result), np.ones((32, 16)))
    assert [array_of(value).is_deleted() for value in (x, y, z)] == expected


@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('donate', [(True, True), (0,)], ids=str)
def test_named_jit_and_friends__donations_of_another_form(mesh, api, donate):
    with (
        jax.set_mesh(mesh),
        pytest.raises(ArgumentError if api is axes else ValueError, match=r'donate_args|filter_spec'),
    ):
        api.named_jit(lambda x: x, donate_args=donate)(zeros())
    stated('| `donate_args` of another form | ValueError | `ArgumentError` |')


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__arguments_keep_their_shardings(mesh, api):
    """Without in_axis_resources the arguments' own shardings are used."""
    with jax.set_mesh(mesh):
        x = api.shard(zeros(), resources({'seqlen': 'model'}))
        compiled = api.named_jit(plus_one, DATA).lower(x).compile()
    (sharding,) = jax.tree.leaves(compiled.input_shardings)
    assert sharding.is_equivalent_to(NamedSharding(mesh, P(None, 'model')), 2)


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__arguments_of_another_sharding(mesh, api):
    with jax.set_mesh(mesh):
        x = api.shard(zeros(), resources({'batch': 'model'}))
        function = api.named_jit(plus_one, in_axis_resources=DATA, out_axis_resources=DATA)
        if api is axes:
            assert_sharded(function(x), mesh, 'data')
        else:
            with pytest.raises(ValueError, match=r'[Ss]harding'):
                function(x)
    stated("| arguments of `named_jit` with other shardings than `in_axis_resources` | JAX's error | moved |")


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__arrays_without_names(mesh, api):
    mapping = {'batch': 'data'}
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((32, 16)), NamedSharding(mesh, P(None, 'model')))
        result = api.named_jit(plus_one, out_axis_resources=mapping)(x)
    assert result.sharding.is_fully_replicated == (api is not axes)
    stated(
        '| arguments and results of `named_jit` without names | replicated | arguments keep their shardings; '
        'results are left to the compiler |'
    )


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__numpy_arrays_are_data(mesh, api):
    def function(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return jnp.asarray(x) + 1

    seen = []
    with jax.set_mesh(mesh):
        for value in (1, 2):
            np.testing.assert_array_equal(api.named_jit(function)(np.full(8, value)), np.full(8, value + 1))
    assert {*seen} == {True}


@pytest.mark.parametrize('api', API)
def test_named_jit_and_friends__other_arguments_are_part_of_the_program(mesh, api):
    """What is not an array passes through, as a static argument does."""
    compiled = api.named_jit(lambda x, scale, name: {'x': x * scale, 'name': name, 'double': scale * 2}, DATA)
    with jax.set_mesh(mesh):
        result = compiled(zeros(), 3, name='mlp')
    assert_sharded(result['x'], mesh, 'data')
    assert (result['name'], result['double'], type(result['double'])) == ('mlp', 6, int)


@pytest.mark.medium
@needs_haliax
@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('function', ['named_jit', 'fsdp'])
def test_named_jit_and_friends__operations_of_haliax_read_the_mapping(mesh, api, function):
    def noise():
        result = hax.random.normal(jax.random.key(0), (BATCH, SEQLEN))
        constrained.append(hax.auto_sharded(result) is not result)
        return hax.sum(result, 'batch')

    constrained = []
    mapping = {'batch': 'data', 'heads': 'model', 'mlp': 'model'}
    compiled = api.named_jit(noise, mapping) if function == 'named_jit' else api.fsdp(noise, {}, mapping)
    with jax.set_mesh(mesh):
        result = compiled()
    assert {*constrained} == {True}
    assert result.array.shape == (SEQLEN.size,)
    stated("Inside `named_jit` and `fsdp`, haliax's own operations")


# Querying the Mesh and Axis Mapping ------------------------------------------------------------------

MAPPING = {'batch': 'data', 'mlp': 'model', 'vocab': ('data', 'model')}
VOCAB, EMBED = Axis('vocab', 50257), Axis('embed', 6)

QUERIES = {
    'physical_axis_name(axis)': (lambda api: api.physical_axis_name(BATCH), 'data'),
    'physical_axis_name(name)': (lambda api: api.physical_axis_name('batch'), 'data'),
    'physical_axis_name(axis, mapping)': (
        lambda api: api.physical_axis_name(BATCH, {'batch': 'model'}),
        'model',
    ),
    'physical_axis_name(axis=, mapping=)': (
        lambda api: api.physical_axis_name(axis='b', mapping={'b': 'model'}),
        'model',
    ),
    'physical_axis_name of several': (lambda api: api.physical_axis_name('vocab'), ('data', 'model')),
    'physical_axis_name of none': (lambda api: api.physical_axis_name('embed'), None),
    'physical_axis_size(axis)': (lambda api: api.physical_axis_size(BATCH), 4),
    'physical_axis_size(name)': (lambda api: api.physical_axis_size('mlp'), 2),
    'physical_axis_size(axis, mapping)': (lambda api: api.physical_axis_size(BATCH, {'batch': 'model'}), 2),
    'physical_axis_size(axis=, mapping=)': (
        lambda api: api.physical_axis_size(axis=BATCH, mapping={'batch': ['model']}),
        2,
    ),
    'physical_axis_size is a product': (lambda api: api.physical_axis_size('vocab'), 8),
    'physical_axis_size of none': (lambda api: api.physical_axis_size(EMBED), None),
    'round_axis_for_partitioning(axis)': (
        lambda api: api.round_axis_for_partitioning(VOCAB),
        Axis('vocab', 50264),
    ),
    'round_axis_for_partitioning(axis, mapping)': (
        lambda api: api.round_axis_for_partitioning(VOCAB, {'vocab': 'model'}),
        Axis('vocab', 50258),
    ),
    'round_axis_for_partitioning(axis=, mapping=)': (
        lambda api: api.round_axis_for_partitioning(axis=VOCAB, mapping={'vocab': 'data'}),
        Axis('vocab', 50260),
    ),
    'round_axis_for_partitioning of a multiple': (
        lambda api: api.round_axis_for_partitioning(BATCH),
        BATCH,
    ),
    'round_axis_for_partitioning of none': (lambda api: api.round_axis_for_partitioning(EMBED), EMBED),
}
SHARDINGS = {
    'sharding_for_axis(axis)': (lambda api, mesh: api.sharding_for_axis(BATCH), ('data',)),
    'sharding_for_axis(name)': (lambda api, mesh: api.sharding_for_axis('mlp'), ('model',)),
    'sharding_for_axis(axes)': (
        lambda api, mesh: api.sharding_for_axis((EMBED, BATCH, 'mlp')),
        (None, 'data', 'model'),
    ),
    'sharding_for_axis(shape)': (
        lambda api, mesh: api.sharding_for_axis({'batch': 8, 'embed': 4, 'mlp': 2}),
        ('data', None, 'model'),
    ),
    'sharding_for_axis(partial shape)': (
        lambda api, mesh: api.sharding_for_axis({'batch': None, 'mlp': 2}),
        ('data', 'model'),
    ),
    'sharding_for_axis(axis, mapping)': (
        lambda api, mesh: api.sharding_for_axis(BATCH, {'batch': 'model'}),
        ('model',),
    ),
    'sharding_for_axis(axis, mapping, mesh)': (
        lambda api, mesh: api.sharding_for_axis(BATCH, MAPPING, mesh),
        ('data',),
    ),
    'sharding_for_axis(axis=, mapping=, mesh=)': (
        lambda api, mesh: api.sharding_for_axis(axis={'vocab': 8}, mapping=MAPPING, mesh=mesh),
        (('data', 'model'),),
    ),
}


@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('query', QUERIES.values(), ids=QUERIES)
def test_querying_the_mesh_and_axis_mapping(mesh, api, query):
    ask, expected = query
    with jax.set_mesh(mesh), api.axis_mapping(MAPPING):
        assert ask(api) == expected


@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('query', SHARDINGS.values(), ids=SHARDINGS)
def test_querying_the_mesh_and_axis_mapping__sharding_for_axis(mesh, api, query):
    ask, spec = query
    with jax.set_mesh(mesh), api.axis_mapping(MAPPING):
        sharding = ask(api, mesh)
    assert isinstance(sharding, NamedSharding)
    assert sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), 3)
    if api is axes:
        assert sharding.spec == P(*spec)
    stated(
        '| `sharding_for_axis(axes).spec` | an entry for each dimension | equivalent, without None at the '
        'end |'
    )


@pytest.mark.parametrize('api', API)
def test_querying_the_mesh_and_axis_mapping__without_a_mapping(mesh, api):
    """A name is not mapped, and an axis is not rounded."""
    with jax.set_mesh(mesh):
        assert api.physical_axis_name('batch') is None
        assert api.physical_axis_size('batch') is None
        assert api.round_axis_for_partitioning(VOCAB) == VOCAB
        assert api.sharding_for_axis((BATCH, EMBED)).is_fully_replicated


@pytest.mark.parametrize('api', API)
@pytest.mark.parametrize('query', ['physical_axis_size', 'round_axis_for_partitioning', 'sharding_for_axis'])
def test_querying_the_mesh_and_axis_mapping__without_a_mesh(api, query):
    # A MeshError is a ValueError.
    error, text = (MeshError, 'needs a mesh') if api is axes else (ValueError, 'No mesh found')
    with pytest.raises(error, match=text):
        getattr(api, query)(BATCH, MAPPING)
    assert issubclass(MeshError, ValueError)


def test_querying_the_mesh_and_axis_mapping__sizes_without_an_axis(mesh):
    with jax.set_mesh(mesh):
        assert axes.round_axis_for_partitioning(50257, 'vocab', MAPPING) == 50264
        assert axes.round_axis_for_partitioning('vocab', MAPPING, size=50257) == 50264
        assert axes.round_axis_for_partitioning(50257, {'vocab': 'data'}) == 50260
    stated(
        '| `round_axis_for_partitioning(axis, mapping)` | takes an `Axis` | also a size and a name: `(50257, '
        "'vocab', mapping)` |"
    )


@needs_haliax
def test_querying_the_mesh_and_axis_mapping__pspec_for(mesh):
    """The document names it in passing: the specs of a tree, and of named dimensions."""
    tree = {'x': zeros(), 'plain': jnp.ones(8)}
    assert axes.pspec_for(tree, MAPPING) == {'x': P('data', None), 'plain': P()}
    assert HALIAX.pspec_for(tree, resource_mapping=MAPPING)['x'] is None  # the array is on a device
    assert HALIAX.pspec_for(tree, MAPPING, preserve_existing_shardings=False)['x'] == P('data', None)
    helper = MeshShardingHelper.from_mesh(mesh)
    shardings = helper.match_sharding_rule(LogicalAxisShardingRule(MAPPING, strict=False), tree)
    with jax.set_mesh(mesh):
        expected = HALIAX.infer_resource_partitions(tree, MAPPING, preserve_existing_shardings=False)
    for sharding, other in zip(*map(jax.tree.leaves, (shardings, expected)), strict=True):
        assert sharding.is_equivalent_to(other, 2)
    assert axes.pspec_for((BATCH, 'mlp'), MAPPING) == HALIAX.pspec_for_axis((BATCH, 'mlp'), MAPPING)
    stated(
        '| `pspec_for(tree, resource_mapping)` | arrays that are placed: None | `pspec_for(tree, mapping)`: '
        'their specs by the mapping |'
    )
    stated('| `pspec_for_axis(axis, mapping)` | the spec of named dimensions | `pspec_for(axes, mapping)` |')
