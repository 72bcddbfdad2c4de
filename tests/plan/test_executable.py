"""Programs that plans save: what another process loads and calls, and what it says of those it cannot."""

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._plan import saved_program
from scalax.errors import ArgumentError, DataError, MeshError, PlacementError, PlanError
from scalax.plan import Plan, load_executable, search
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from scalax.testing import assert_no_recompile
from tests.support import ROOT, tpu_compiler
from tests.support.processes import run_checks

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
W, X = jax.ShapeDtypeStruct((16, 8), 'float32'), jax.ShapeDtypeStruct((32, 16), 'float32')

# As a user's script: classes of its own, an argument that is donated, a static one and a default.
SCRIPT = """
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalax.plan import load_executable
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P


class State(NamedTuple):
    w: Any
    steps: Any


def train_step(state, x, rate=0.5, *, negative=False):
    gradient = jax.grad(lambda w: jnp.square(x @ w).mean())(state.w)
    sign = 1 if negative else -1
    return State(state.w + sign * rate * gradient, state.steps + 1), {'norm': jnp.square(gradient).sum()}


def make_step(helper):
    rules = State(P('fsdp', 'tp'), P()), P('fsdp')
    step = helper.sjit(train_step, in_shardings=rules, donate_argnums=0, static_argnames='negative')
    struct = jax.ShapeDtypeStruct
    return step, (State(struct((16, 8), 'float32'), struct((), 'int32')), struct((32, 16), 'float32'))


def values():
    random = np.random.default_rng(0)
    return State(random.standard_normal((16, 8), 'float32'), np.int32(3)), random.standard_normal(
        (32, 16), 'float32'
    )


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    if sys.argv[1] == 'save':
        step, arguments = make_step(helper)
        helper.plan(step, *arguments).save_executable(sys.argv[2])
    state, x = values()
    step = make_step(helper)[0] if sys.argv[1] == 'save' else load_executable(sys.argv[2], helper)
    placed = helper.shard(state, State(P('fsdp', 'tp'), P()))
    state, metrics = step(placed, x)
    assert placed.w.is_deleted() and type(state) is State
    print(state.w.sharding.spec, int(state.steps), float(state.w.sum()).hex(), float(metrics['norm']).hex())
"""


def run(*command):
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_gets_what_the_step_gives(tmp_path):
    script, file = tmp_path / 'job.py', tmp_path / 'step.bin'
    script.write_text(SCRIPT)
    said = run(script, 'save', file)
    assert said.startswith("P('fsdp', 'tp') 4 ")
    assert run(script, 'load', file) == said


@pytest.mark.one_jax
def test_the_command_line_saves_what_the_script_loads(tmp_path):
    script, file, plan = tmp_path / 'job.py', tmp_path / 'step.bin', tmp_path / 'own.bin'
    script.write_text(SCRIPT)
    run('-m', 'scalax', 'plan', f'{script}:make_step', '--mesh', 'fsdp=4,tp=2', '--save-executable', file)
    # Its classes are those of job.py there, and those of the running script here.
    assert run(script, 'load', file) == run(script, 'save', plan)


def test_processes_load_what_one_of_them_has_saved(tmp_path, monkeypatch):
    monkeypatch.setenv('SCALAX_TEST_FOLDER', str(tmp_path))
    outcome = run_checks('tests.support.executable_checks', processes=2, devices=4)
    assert outcome.passed == {'check_a_saved_program'}, outcome


@pytest.fixture(scope='module')
def product(tmp_path_factory):
    """A step, its plan, and the file of its program."""
    step = HELPER.sjit(lambda w, x: x @ w, in_shardings=(P('fsdp', 'tp'), P('fsdp')))
    plan = HELPER.plan(step, W, X)
    path = tmp_path_factory.mktemp('program') / 'product.bin'
    plan.save_executable(path)
    return step, plan, path


def test_nothing_is_compiled(product):
    _, plan, path = product
    w, x = np.ones((16, 8), 'float32'), np.arange(32 * 16, dtype='float32').reshape(32, 16)
    with assert_no_recompile(product[0]):
        loaded = load_executable(path, HELPER)
        result = loaded(w, x)
    np.testing.assert_array_equal(result, x @ w)
    assert loaded.plan == plan and loaded.plan.program is None
    assert repr(loaded) == "<Executable of <lambda> on 8 'cpu' devices (fsdp=4, tp=2)>"


def test_keywords_and_an_order_of_devices(tmp_path):
    devices = jax.devices()[::-1]
    helper = MeshShardingHelper([8], ['x'], devices=devices)
    step = helper.sjit(lambda tree, *, scale: {'y': tree['a'] * scale}, in_shardings=P('x'))
    path = tmp_path / 'step.bin'
    scale = jax.ShapeDtypeStruct((8,), 'float32')
    helper.plan(step, {'a': scale}, scale=scale).save_executable(path)
    loaded = load_executable(path, helper)
    y = loaded({'a': jnp.arange(8.0)}, scale=np.full(8, 2, 'float32'))['y']
    assert y.tolist() == [2.0 * i for i in range(8)]
    assert y.addressable_shards[0].device == devices[0] or y.sharding.device_set == {*devices}
    with pytest.raises(PlanError, match=r'order of devices: \(7, 6, .*and here \(0, 1'):
        load_executable(path, MeshShardingHelper([8], ['x'], devices=jax.devices()))


@pytest.mark.parametrize(
    'arguments',
    [
        ({'w': 1}, 2),
        ('by name', np.ones((32, 16), 'float32')),
        (np.ones((16, 8), 'float32'),),
        (np.ones((16, 4), 'float32'), np.ones((32, 16), 'int32')),
        ('placed', np.ones((32, 16), 'float32')),
    ],
    ids=['a tree', 'by name', 'too few', 'shapes and dtypes', 'placed otherwise'],
)
def test_arguments_that_it_does_not_take(product, snapshot, arguments):
    loaded = load_executable(product[2], HELPER)
    keywords = {}
    if isinstance(arguments[0], str) and arguments[0] == 'by name':
        arguments, keywords = (np.ones((16, 8), 'float32'),), {'x': arguments[1]}
    elif isinstance(arguments[0], str):
        arguments = (HELPER.shard(np.ones((16, 8), 'float32'), P()), arguments[1])
    with pytest.raises((ArgumentError, PlacementError)) as raised:
        loaded(*arguments, **keywords)
    snapshot(str(raised.value))


@pytest.mark.parametrize('transform', [jax.jit, lambda call: jax.grad(lambda x: call(x).sum())])
def test_transformations_are_refused_by_jax(product, transform):
    loaded = load_executable(product[2], HELPER)
    w = np.ones((16, 8), 'float32')
    with pytest.raises(TypeError, match=r'(?i)transformation'):
        transform(lambda x: loaded(w, x))(np.ones((32, 16), 'float32'))


def test_an_error_of_the_program_is_its_own(product):
    w = HELPER.shard(np.ones((16, 8), 'float32'), P('fsdp', 'tp'))
    w.delete()
    with pytest.raises(RuntimeError, match='deleted'):
        load_executable(product[2], HELPER)(w, np.ones((32, 16), 'float32'))


@pytest.mark.parametrize(
    'helper',
    [
        MeshShardingHelper([2, 4], ['fsdp', 'tp']),
        MeshShardingHelper([2, 2], ['data', 'tp'], devices=jax.devices()[:4]),
        MeshShardingHelper([4, 2], ['fsdp', 'tp'], axis_types=jax.sharding.AxisType.Explicit),
    ],
    ids=['sizes', 'devices', 'axis types'],
)
def test_a_mesh_that_is_another(product, snapshot, helper):
    with pytest.raises(PlanError) as raised:
        load_executable(product[2], helper)
    snapshot(str(raised.value).replace(str(product[2]), 'FILE'))


def rewritten(path, **fields):
    """A file of a program whose description says something else."""
    first, _, rest = path.read_bytes().split(b'\n', 2)
    length = int(path.read_bytes().split(b'\n', 2)[1])
    head = {**json.loads(rest[:length]), **fields}
    text = json.dumps(head).encode()
    other = path.with_name('other.bin')
    other.write_bytes(first + b'\n%d\n' % len(text) + text + rest[length:])
    return other


def test_other_versions_and_devices(product, snapshot, monkeypatch):
    _, plan, path = product
    values = {**json.loads(plan.to_json()), 'platform': 'tpu', 'device_kind': 'TPU v5 lite'}
    versions = {'scalax': '0.1', 'jax': '0.4.1', 'jaxlib': '0.4.1', 'libtpu': '0.0.1'}
    other = rewritten(path, versions=versions, plan=json.dumps(values))
    monkeypatch.setattr(saved_program.importlib.metadata, 'version', lambda package: '0.10.0')
    with pytest.raises(PlanError) as raised:
        load_executable(other, HELPER)
    snapshot(str(raised.value).replace(str(other), 'FILE'))


class Boom:
    def __reduce__(self):
        return print, ('unpickled!',)


def test_what_does_not_fit_is_not_unpickled(product, capsys):
    _, _, path = product
    trees = pickle.dumps(Boom())
    head = {'versions': {'jax': '0.4.1'}, 'tree_bytes': len(trees), 'program_bytes': 0}
    other = rewritten(path, **head, sha256=hashlib.sha256(trees).hexdigest())
    text = other.read_bytes().split(b'\n', 2)
    other.write_bytes(b'\n'.join(text[:2]) + b'\n' + text[2][: int(text[1])] + trees)
    with pytest.raises(PlanError, match=r'jax: 0\.4\.1, and here'):
        load_executable(other, HELPER)
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
    'damage',
    [
        lambda data: b'',
        lambda data: b'PK\x03\x04',
        lambda data: data.replace(b'executable 1', b'executable 2', 1),
        lambda data: data[:40],
        lambda data: data[:-10],
        lambda data: data[:-10] + bytes(10),
        lambda data: data.replace(b'"versions": {', b'"versions": [', 1),
        lambda data: data.replace(b'"device_ids"', b'"device_idz"', 1),
        lambda data: data.split(b'\n')[0] + b'\n999999999999999\n',
    ],
    ids=[
        'empty',
        'another',
        'a later format',
        'cut in the head',
        'cut',
        'changed',
        'no JSON',
        'a field',
        'a length',
    ],
)
def test_files_that_are_none(product, tmp_path, damage, snapshot):
    path = tmp_path / 'damaged.bin'
    path.write_bytes(damage(product[2].read_bytes()))
    with pytest.raises(DataError) as raised:
        load_executable(path, HELPER)
    said = str(raised.value).replace(str(path), 'FILE')
    snapshot(said if 'bytes of program' not in said else said.partition(':')[0])


def test_no_file_and_no_devices(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_executable(tmp_path / 'none.bin', HELPER)
    with pytest.raises(DataError, match='is not a program'):
        load_executable(tmp_path, HELPER)
    mesh = jax.sharding.AbstractMesh((4, 2), ('fsdp', 'tp'))
    with pytest.raises(MeshError, match='AbstractMesh'):
        load_executable(tmp_path, MeshShardingHelper.from_mesh(mesh))


def test_classes_that_are_not_there(tmp_path):
    script, file = tmp_path / 'job.py', tmp_path / 'step.bin'
    script.write_text(SCRIPT)
    run(script, 'save', file)
    with pytest.raises(PlanError, match=r'needs a class that is not here: .*State'):
        load_executable(file, HELPER)


def test_plans_without_a_program(product, tmp_path, snapshot):
    _, plan, _ = product
    path = tmp_path / 'step.bin'
    for none in (Plan.load(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert none == plan
        with pytest.raises(PlanError) as raised:
            none.save_executable(path)
    snapshot(str(raised.value))
    alone = HELPER.plan(jax.jit(lambda x: x + 1), X)
    with pytest.raises(PlanError) as raised:
        alone.save_executable(path)
    snapshot(str(raised.value))
    with pytest.raises(ArgumentError, match=r'no/such/step.bin. cannot be written'):
        plan.save_executable(tmp_path / 'no/such/step.bin')
    assert not [*tmp_path.iterdir()]
    assert plan.with_model_flops(1e9).program is plan.program
    assert 'program' not in plan.to_dict()


def test_a_link_stays_one_and_a_full_disk_names_the_file(product, tmp_path, monkeypatch):
    _, plan, _ = product
    link, file = tmp_path / 'newest.bin', tmp_path / 'step.bin'
    link.symlink_to(file)
    plan.save_executable(link)
    assert link.is_symlink() and not file.is_symlink()
    before = file.read_bytes()

    def full(*files):
        raise OSError(errno.ENOSPC, 'No space left on device', *map(str, files))

    monkeypatch.setattr(saved_program.os, 'replace', full)
    with pytest.raises(OSError, match='No space left') as raised:
        plan.save_executable(link)
    assert raised.value.filename == str(link)
    assert file.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [link, file]


def test_a_program_that_calls_back(tmp_path):
    def step(x):
        jax.debug.print('{}', x.sum())
        return x + 1

    plan = HELPER.plan(HELPER.sjit(step, in_shardings=P('fsdp')), X)
    with pytest.raises(PlanError, match=r"(?s)cannot save the program of 'step': .*take out what calls back"):
        plan.save_executable(tmp_path / 'step.bin')
    assert not [*tmp_path.iterdir()]


def test_classes_that_cannot_be_found_again(tmp_path):
    class Local:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Local, lambda each: ((each.x,), None), lambda _, x: Local(*x))
    plan = HELPER.plan(HELPER.sjit(lambda tree: Local(tree.x + 1), in_shardings=P('fsdp')), Local(X))
    with pytest.raises(PlanError, match=r'(?s)hold a class that cannot be pickled: .*define it at the top'):
        plan.save_executable(tmp_path / 'step.bin')


@tpu_compiler.needed
def test_a_program_for_tpus_names_them_elsewhere(tmp_path, snapshot, monkeypatch):
    helper = MeshShardingHelper.from_topology('v5e:2x4', [4, 2], ['fsdp', 'tp'])
    step = helper.sjit(lambda w, x: x @ w, in_shardings=(P('fsdp', 'tp'), P('fsdp')))
    plan = helper.plan(step, W, X, quick=True)
    path = tmp_path / 'step.bin'
    plan.save_executable(path)
    assert path.read_bytes().count(b'scalax-plan') == 0  # the folder in which a plan has the compiler write
    with pytest.raises(PlanError) as raised:
        load_executable(path, HELPER)
    lines = str(raised.value).splitlines()
    assert [line.strip() for line in lines if 'libtpu' not in line][1:3] == [
        'platform: tpu, and here cpu',
        'kind of device: TPU v5 lite, and here cpu',
    ]
    with pytest.raises(MeshError, match='devices that are not here'):
        load_executable(path, helper)


@tpu_compiler.needed
def test_what_does_not_fit_is_not_saved(tmp_path):
    helper = MeshShardingHelper.from_topology('v5e:2x2', [-1], ['fsdp'])
    big = jax.ShapeDtypeStruct((1 << 18, 1 << 18), 'float32')
    step = helper.sjit(lambda x: x + 1, in_shardings=P('fsdp'), out_shardings=P('fsdp'))
    for quick, said in ((False, 'does not fit into memory'), (True, 'has no program to save')):
        with pytest.raises(PlanError, match=said):
            helper.plan(step, big, quick=quick).save_executable(tmp_path / 'step.bin')
    found = search(
        lambda helper: (helper.sjit(lambda x: x + 1, in_shardings=P('a')), (X,)), 'v5e:2x2', ['a'], full=0
    )
    with pytest.raises(PlanError, match='made by a search'):
        found.best.save_executable(tmp_path / 'step.bin')


@pytest.mark.parametrize('helper', [None, 'fsdp=8'])
def test_what_is_no_helper(tmp_path, helper):
    with pytest.raises(ArgumentError, match='takes the path and a MeshShardingHelper, got '):
        load_executable(tmp_path / 'step.bin', helper)
