"""Checkpoints: a state is restored as saved onto any mesh, or an error says why not."""

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

from scalax.checkpoint import Checkpointer
from scalax.checkpoint._target import require_fit
from scalax.errors import CheckpointError, MeshError, MissingDependencyError
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PolicyShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support import checkpoint_checks
from tests.support.snapshots import Snapshot

DO = (
    'What to do: give like as it was when the checkpoint was saved (describe(step) lists the leaves), '
    'or rename=[(regex, replacement)] for other paths, only=regex to restore some leaves, cast=True '
    'to convert dtypes.'
)
RULE = PolicyShardingRule(lambda path, leaf: P('fsdp') if leaf.shape else P())


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def small(helper: MeshShardingHelper, start: float = 0) -> dict[str, Any]:
    x = np.arange(32, dtype=np.float32).reshape(8, 4) + start
    return helper.shard({'params': {'w': x, 'b': x[:, 0]}, 'count': np.int32(3)}, RULE)


def save(folder: Path, state: Any, *steps: int, **options: Any) -> Checkpointer:
    with Checkpointer(folder, **options) as checkpointer:
        for step in steps or (1,):
            assert checkpointer.save(step, state)
    return Checkpointer(folder)


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def assert_equal(actual: Any, expected: Any) -> None:
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other)


# --- Restores ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(2, 4), (8,), (1,), (4, 2)], ids=str)
def test_every_leaf_on_other_meshes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    first = MeshShardingHelper([4, 2], ['x', 'y'])
    checkpointer = save(tmp_path, checkpoint_checks.state(first))
    size = int(np.prod(shape))
    other = MeshShardingHelper(shape, ['x', 'y'][: len(shape)], devices=jax.devices()[-size:])
    rule = checkpoint_checks.rule(other)
    restored = checkpointer.restore(other, rule, checkpoint_checks.state(other), verify=True)
    checkpoint_checks.assert_same(restored, other)


@pytest.mark.medium
def test_forms_of_like(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """A function, a partial function, arrays and structs give the same result."""
    optimizer = optax.adamw(1e-3)

    def init(size: int) -> dict[str, Any]:
        params = {'w': jnp.ones((size, 4)), 'b': jnp.zeros(size)}
        return {'params': params, 'opt_state': optimizer.init(params), 'key': jax.random.key(0)}

    expected = init(8)
    rule = FSDPShardingRule(min_fsdp_size=8)
    checkpointer = save(tmp_path, expected)
    for like in (
        functools.partial(init, 8),
        lambda: init(8),
        expected,
        jax.eval_shape(functools.partial(init, 8)),
    ):
        restored = checkpointer.restore(helper, rule, like)
        assert jax.tree.structure(restored) == jax.tree.structure(expected)
        assert restored['opt_state'][0].mu['w'].sharding.spec == P('fsdp')
        assert restored['opt_state'][0].mu['w'].sharding.mesh == helper.mesh
        keys = [jax.random.key_data(tree.pop('key')) for tree in (restored, {**expected})]
        assert_equal(keys[0], keys[1])
        assert_equal(restored, {name: leaf for name, leaf in expected.items() if name != 'key'})


def test_function_is_traced_and_not_run(tmp_path: Path, helper: MeshShardingHelper) -> None:
    checkpointer = save(tmp_path, small(helper))

    def init() -> Any:
        return jax.tree.map(lambda x: jax.experimental.io_callback(fail, x, x), like)

    def fail(x: Any) -> Any:
        raise AssertionError('it was run')

    like = small(helper)
    assert_equal(checkpointer.restore(helper, RULE, init), like)


def test_temporary_files_are_removed_by_the_commit(tmp_path: Path, helper: MeshShardingHelper) -> None:
    save(tmp_path, small(helper))
    assert [path.name for path in tmp_path.rglob('files.*')] == ['files.json']


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = helper.shard({f'w{i}': np.full((512, 512), i, np.float32) for i in range(8)}, P('fsdp', 'tp'))
    expected = helper.gather(state)
    step = helper.sjit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    state = step(step(state))  # compiled
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        for _ in range(5):
            state = step(state)
        jax.block_until_ready(state)
    assert_equal(Checkpointer(tmp_path).restore(helper, P('fsdp', 'tp'), state), expected)


def test_dtypes_change_only_with_cast(tmp_path: Path, helper: MeshShardingHelper) -> None:
    checkpointer = save(tmp_path, small(helper))
    like = jax.eval_shape(
        lambda: {**small(helper), 'params': jax.tree.map(jnp.bfloat16, small(helper)['params'])}
    )
    assert message(checkpointer.restore, helper, RULE, like) == (
        f'the checkpoint of step 1 in {tmp_path} does not match the requested tree:\n'
        '  params/b: bfloat16[8] was requested, but float32[8] was saved\n'
        f'  params/w: bfloat16[8, 4] was requested, but float32[8, 4] was saved\n{DO}'
    )
    restored = checkpointer.restore(helper, RULE, like, cast=True)
    assert restored['params']['w'].dtype == jnp.bfloat16
    assert_equal(restored['params'], jax.tree.map(jnp.bfloat16, small(helper)['params']))


def test_python_numbers(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = {'large': 2**40, 'float': 0.1, 'flag': True, 'array': jnp.int32(5), 'none': None, 'empty': {}}
    checkpointer = save(tmp_path, state)
    restored = checkpointer.restore(helper, P(), {**state, 'array': 0})
    assert restored == {**state, 'array': 5}
    assert type(restored['array']) is int
    like = {**state, 'flag': np.bool_(0), 'large': 0.0}
    assert message(checkpointer.restore, helper, P(), like) == (
        f'the checkpoint of step 1 in {tmp_path} does not match the requested tree:\n'
        f'  large: Python float was requested, but Python int was saved\n{DO}'
    )
    assert checkpointer.restore(helper, P(), like, cast=True)['large'] == 2.0**40


def test_large_python_numbers(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = {'seed': 2**64 - 1, 'tokens': 2**40, 'step': 7, 'best': float('inf')}
    checkpointer = save(tmp_path, state)
    assert checkpointer.restore(helper, P(), state) == state
    # If `like` is a function, Python numbers become arrays.
    small = checkpointer.restore(helper, P(), lambda: {'step': 0, 'best': 0.0}, only='step|best')
    assert {name: (x.dtype, float(x)) for name, x in small.items()} == {
        'step': (jnp.int32, 7),
        'best': (jnp.float32, float('inf')),
    }
    assert small['step'].sharding.is_equivalent_to(jax.NamedSharding(helper.mesh, P()), 0)
    for like in (lambda: {'tokens': 0}), {'tokens': np.int32(0)}:
        assert message(checkpointer.restore, helper, P(), like, only='tokens') == (
            f'the checkpoint of step 1 in {tmp_path}: tokens is 1099511627776, which does not fit in int32. '
            'To restore a Python int, give like as a tree that has one there (a function turns Python '
            'numbers into arrays)'
        )
    text = message(checkpointer.restore, helper, P(), {'best': 0}, only='best', cast=True)
    assert 'best is inf, which does not fit in int. To restore a Python float' in text


def test_other_memory_and_explicit_axes(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = small(helper)
    checkpointer = save(tmp_path, state)
    pinned = checkpointer.restore(helper, RULE.with_memory_kind('pinned_host'), state)
    assert pinned['params']['w'].sharding.memory_kind == 'pinned_host'
    assert_equal(pinned, state)
    explicit = MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=AxisType.Explicit)
    restored = checkpointer.restore(explicit, RULE, state)
    assert jax.typeof(restored['params']['w']).sharding.spec == P('fsdp', None)
    assert_equal(restored, state)


def test_partial_restore(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = small(helper)
    checkpointer = save(tmp_path, state)
    # Only a subtree of the saved state.
    restored = checkpointer.restore(helper, RULE, {'params': state['params']}, only='^params/')
    assert_equal(restored, {'params': state['params']})
    # The other leaves of `like` stay unchanged.
    like = {
        'params': jax.tree.map(jnp.zeros_like, state['params']),
        'count': jnp.int32(-1),
        'new': jnp.ones(8),
    }
    restored = checkpointer.restore(helper, RULE, like, only='^params/w')
    assert_equal(restored['params'], {'w': state['params']['w'], 'b': np.zeros(8)})
    assert restored['count'] is like['count'] and restored['new'] is like['new']
    abstract = checkpointer.restore(helper, RULE, lambda: like, only='^params/w')
    assert isinstance(abstract['new'], jax.ShapeDtypeStruct)
    assert abstract['new'].sharding.spec == P('fsdp')


def test_renamed_paths(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = small(helper)
    checkpointer = save(tmp_path, state)
    like = {'model': {'dense': {'kernel': state['params']['w'], 'bias': state['params']['b']}}, 'count': 0}
    rename = [('^params/w$', 'model/dense/kernel'), (r'^params/(b)$', r'model/dense/\1ias')]
    restored = checkpointer.restore(helper, RULE, like, rename=rename)
    assert_equal(restored['model']['dense']['kernel'], state['params']['w'])
    assert_equal(restored['model']['dense']['bias'], state['params']['b'])
    assert message(checkpointer.restore, helper, RULE, like, rename=[('^params/.', 'model/x')]) == (
        f"rename gives two leaves of the checkpoint of step 1 in {tmp_path} the same path: 'params/b' "
        "and 'params/w' become 'model/x'"
    )


def test_mismatches_are_listed(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = small(helper)
    checkpointer = save(tmp_path, state)
    like = {
        'params': {'v': state['params']['w'], 'b': np.zeros((8, 2), np.float32)},
        'count': np.int32(0),
        'key': jax.random.key(0),
    }
    assert message(checkpointer.restore, helper, RULE, like) == (
        f'the checkpoint of step 1 in {tmp_path} does not match the requested tree:\n'
        '  key: key<fry>[] is missing\n'
        '  params/b: float32[8, 2] was requested, but float32[8] was saved\n'
        '  params/v: float32[8, 4] is missing\n'
        f'  params/w: float32[8, 4] is only in the checkpoint\n{DO}'
    )


def test_description(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = {**small(helper), 'key': jax.random.key(0), 'step': 3}
    assert save(tmp_path, state, 7).describe(7) == {
        'count': jax.ShapeDtypeStruct((), 'int32'),
        'key': jax.ShapeDtypeStruct((2,), 'uint32'),
        'params/b': jax.ShapeDtypeStruct((8,), 'float32'),
        'params/w': jax.ShapeDtypeStruct((8, 4), 'float32'),
        'step': int,
    }


@pytest.mark.medium
@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg'])
def test_key_implementations(tmp_path: Path, helper: MeshShardingHelper, impl: str) -> None:
    state = {'a/b': jax.random.key(0, impl='rbg'), 'a.b': np.zeros(2, np.uint32)}
    checkpointer = save(tmp_path, state)
    like = {**state, 'a/b': jax.random.key(1, impl=impl)}
    if impl == 'rbg':
        restored = checkpointer.restore(helper, P(), like)
        assert_equal(jax.random.key_data(restored['a/b']), jax.random.key_data(state['a/b']))
    else:
        assert 'a/b has dtype key<rbg>, but key<urbg> was requested' in message(
            checkpointer.restore, helper, P(), like
        )
    like['a/b'] = jax.random.key(1)
    assert 'a/b: key<fry>[] was requested, but uint32[4] was saved' in message(
        checkpointer.restore, helper, P(), like
    )
    like['a/b'] = np.zeros(4, np.uint32)
    assert 'a/b has dtype key<rbg>, but uint32 was requested' in message(
        checkpointer.restore, helper, P(), like
    )


# --- Steps ---------------------------------------------------------------------------------------


@pytest.mark.medium
def test_which_steps_are_saved_and_kept(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = small(helper)
    with Checkpointer(tmp_path, keep=2, save_every=10) as checkpointer:
        assert checkpointer.latest_step() is None and checkpointer.restored_step is None
        assert message(checkpointer.restore, helper, RULE, state) == f'{tmp_path} has no checkpoint'
        saved = [step for step in range(45) if checkpointer.save(step, state)]
        assert saved == [0, 10, 20, 30, 40]
        assert not checkpointer.save(40, state, force=True)  # it exists already
        assert checkpointer.save(43, state, force=True)
        checkpointer.wait()
        assert checkpointer.latest_step() == 43
    assert sorted(path.name for path in tmp_path.iterdir()) == ['40', '43', 'writer.json']
    with Checkpointer(tmp_path, keep=None) as again:
        again.restore(helper, RULE, state)
        assert again.restored_step == 43
        assert not again.save(43, state)
        assert message(again.save, 41, state) == (
            f'step 41 cannot be saved: {tmp_path} already holds step 43, from another run or from '
            'later in this one. Restore the latest step and continue from there, or save to another directory'
        )
        assert again.save(44, state)
    assert message(again.restore, helper, RULE, state, step=5) == (
        f'{tmp_path} has no checkpoint of step 5: it has 40, 43, 44'
    )


@pytest.mark.medium
def test_unfinished_step_is_ignored_and_replaced(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = small(helper)
    save(tmp_path, state, 1)
    unfinished = tmp_path / '2.orbax-checkpoint-tmp'
    unfinished.mkdir()
    (unfinished / 'state').mkdir()
    reader = Checkpointer(tmp_path)
    assert reader.latest_step() == 1
    reader.restore(helper, RULE, state)
    assert unfinished.exists()  # reading changes nothing: another process may be writing it
    save(tmp_path, state, 2)
    assert Checkpointer(tmp_path).latest_step() == 2
    assert not unfinished.exists()


class Numbers:
    """A data iterator with the methods of Grain."""

    def __init__(self) -> None:
        self.position = 0

    def get_state(self) -> dict[str, int]:
        return {'position': self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state['position']


@pytest.mark.medium
def test_data_state(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state, numbers = small(helper), Numbers()
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in (1, 2):
            numbers.position = 10 * step
            checkpointer.save(step, state, data=numbers)
        numbers.position = 99  # the state is copied when save is called
        checkpointer.save(3, state, data=b'\x00bytes')
        checkpointer.save(4, state, data=[1, 'two', None])
        checkpointer.save(5, state)
        assert 'neither bytes nor JSON' in message(checkpointer.save, 6, state, data={1, 2})
        for data, why in (({1: 0, '1': 0}, "the key '1' occurs twice"), (10**100, 'more than 100 digits')):
            assert why in message(checkpointer.save, 6, state, data=data)
    checkpointer.restore(helper, RULE, state, step=1, data=numbers)
    assert numbers.position == 10
    assert checkpointer.data() == {'position': 10}  # of the restored step
    assert [checkpointer.data(step) for step in (2, 3, 4)] == [
        {'position': 20},
        b'\x00bytes',
        [1, 'two', None],
    ]
    assert message(checkpointer.restore, helper, RULE, state, data=numbers) == (
        f'the checkpoint of step 5 in {tmp_path} has no data.0-of-1, the data state of this process, which '
        'save(..., data=iterator) writes: it has none. If another number of processes saved it, restore '
        'without data=, and set the iterator yourself'
    )
    assert numbers.position == 10


@pytest.mark.medium
def test_threads_take_turns(tmp_path: Path, helper: MeshShardingHelper) -> None:
    checkpointer = Checkpointer(tmp_path)
    state = small(helper)

    def saved(step: int) -> bool:
        try:
            return checkpointer.save(step, state)
        except CheckpointError as error:  # another thread was earlier, with a later step
            assert f'step {step} cannot be saved: {tmp_path} already holds step' in str(error)
            return False

    with ThreadPoolExecutor(6) as pool:
        done = dict(zip(range(6), pool.map(saved, range(6)), strict=True))
        restored = [pool.submit(checkpointer.restore, helper, RULE, state) for _ in range(6)]
    assert done[5]
    assert checkpointer.restored_step == checkpointer.latest_step() == 5
    for tree in restored:
        assert_equal(tree.result(), state)
    checkpointer.close()


def test_save_before_existing_steps_is_an_error(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """It also does not take over the directory of a run that continues there."""
    with Checkpointer(tmp_path) as first, Checkpointer(tmp_path) as second:
        assert first.save(5, small(helper))
        first.wait()
        assert message(second.save, 2, small(helper)) == (
            f'step 2 cannot be saved: {tmp_path} already holds step 5, from another run or from '
            'later in this one. Restore the latest step and continue from there, or save to another directory'
        )
        assert first.save(6, small(helper))


# --- Trees of other libraries --------------------------------------------------------------------


@pytest.mark.medium
def test_lists_of_modules(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """Nodes whose children have indices and names, which Orbax cannot restore as a tree."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, seed: int, layers: int = 11) -> None:
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(layers)])
            self.heads = nnx.List([nnx.List([nnx.Linear(8, 4, rngs=rngs)])])

    model = Model(0)
    graph, params = nnx.split(model)
    for number, (state, like) in enumerate(
        [
            ({'model': model, 'step': 3}, {'model': Model(1), 'step': 0}),
            ({'params': params}, {'params': nnx.split(Model(1))[1]}),
            ({'params': nnx.to_pure_dict(params)}, {'params': nnx.to_pure_dict(nnx.split(Model(1))[1])}),
        ]
    ):
        checkpointer = save(tmp_path / str(number), state)
        restored = checkpointer.restore(helper, P(), like, verify=True)
        assert jax.tree.structure(restored) == jax.tree.structure(like)
        assert_equal(restored, state)
    kernel = checkpointer.restore(helper, P(), state, only='layers/10/kernel')['params']['layers'][10]
    np.testing.assert_array_equal(kernel['kernel'], model.layers[10].kernel)
    assert graph is not None


# --- Unsavable states ----------------------------------------------------------------------------


def test_unsavable_leaves_are_listed(tmp_path: Path, helper: MeshShardingHelper, snapshot: Snapshot) -> None:
    gone = jnp.ones(3)
    gone.delete()
    state = {
        'a': {'b': jnp.ones(2)},
        'a.b': jnp.ones(2),
        'c': 1j,
        'd': 'text',
        'e': gone,
        'f': jnp.ones((0, 2)),
        'g': np.ma.masked_array(np.ones(2, np.float32), [True, False]),
    }
    with Checkpointer(tmp_path) as checkpointer:
        snapshot(message(checkpointer.save, 1, state))
        snapshot(message(checkpointer.save, 1, {'a/b': jnp.ones(2), 'a': {'b': jnp.ones(2)}}))
        assert message(checkpointer.save, 1, jnp.ones(2)) == (
            "the state is a single leaf; give a tree, such as {'params': leaf}"
        )
        for empty in ({}, {'a': None, 'b': ()}):
            assert message(checkpointer.save, 1, empty) == (
                'the state has no leaves: there is nothing to save'
            )
        assert 'value inside a traced function' in message(
            jax.jit(lambda x: checkpointer.save(1, {'x': x})), jnp.ones(2)
        )
    assert not list(tmp_path.iterdir())


def test_without_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'orbax.checkpoint', None)
    with pytest.raises(MissingDependencyError) as caught:
        Checkpointer(tmp_path)
    assert str(caught.value) == ('checkpoints need Orbax: pip install orbax-checkpoint')


def test_orbax_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax is installed, so the error does not advise to install it."""
    monkeypatch.delitem(sys.modules, 'orbax.checkpoint')
    (tmp_path / 'orbax' / 'checkpoint').mkdir(parents=True)
    (tmp_path / 'orbax' / 'checkpoint' / '__init__.py').write_text('from jax import gone_in_this_version')
    monkeypatch.setattr(sys.modules['orbax'], '__path__', [str(tmp_path / 'orbax')])
    with pytest.raises(ImportError, match='gone_in_this_version') as caught:
        Checkpointer(tmp_path / 'steps')
    assert not isinstance(caught.value, MissingDependencyError)


def test_a_mesh_without_devices(tmp_path: Path) -> None:
    abstract = MeshShardingHelper.from_mesh(jax.sharding.AbstractMesh((4,), ('fsdp',)))
    with pytest.raises(MeshError):
        Checkpointer(tmp_path).restore(abstract, P(), {})


# --- Orbax alone ---------------------------------------------------------------------------------


@pytest.mark.medium
def test_interchange_with_orbax(tmp_path: Path, helper: MeshShardingHelper) -> None:
    state = {**small(helper), 'key': jax.random.key(1), 'step': 2}
    save(tmp_path / 'ours', state)
    by_orbax = ocp.StandardCheckpointer().restore(tmp_path / 'ours' / '1' / 'state')
    assert_equal(by_orbax['params/w'], state['params']['w'])
    with ocp.CheckpointManager(tmp_path / 'ours') as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        assert_equal(manager.restore(1, args=args)['state']['params/w'], state['params']['w'])
    with ocp.CheckpointManager(tmp_path / 'theirs') as manager:
        manager.save(4, args=ocp.args.StandardSave(state))
    ours = Checkpointer(tmp_path / 'theirs')
    restored = ours.restore(helper, RULE, state)
    assert_equal(jax.random.key_data(restored.pop('key')), jax.random.key_data(state.pop('key')))
    assert restored.pop('step') == state.pop('step')
    assert_equal(restored, state)
    where = f'the checkpoint of step 4 in {tmp_path / "theirs"}'
    assert message(ours.restore, helper, RULE, state, verify=True) == (
        f'{where} cannot be verified, because it was saved without checksums. Restore it without verify=True'
    )


def test_relative_directory(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer('somewhere')
    monkeypatch.chdir(os.sep)
    checkpointer.save(1, small(helper))
    checkpointer.close()
    assert (tmp_path / 'somewhere' / '1').is_dir()


def test_differences_are_reported_once_and_in_full() -> None:
    """Paths may contain a colon, and there may be many layers."""
    saved = {
        'a: b': jax.ShapeDtypeStruct((3,), 'float32'),
        **{f'layers/{i}/w': jax.ShapeDtypeStruct((2,), 'float32') for i in range(80)},
    }
    expected: dict[str, Any] = {
        'a: b': jax.ShapeDtypeStruct((4,), 'float32'),
        **{f'layers/{i}/w': jax.ShapeDtypeStruct((2,), 'bfloat16') for i in range(80)},
        'b': jax.ShapeDtypeStruct((), 'int32'),
    }
    with pytest.raises(CheckpointError) as caught:
        require_fit(expected, saved, cast=False, partial=False, where='it')
    assert str(caught.value).splitlines()[:4] == [
        'it does not match the requested tree:',
        '  a: b: float32[4] was requested, but float32[3] was saved',
        '  layers/{0..79}/w: 80 x bfloat16[2] was requested, but float32[2] was saved',
        '  b: int32[] is missing',
    ]
