"""The public names of scalax, their signatures and first lines of docstrings, as in ``tests/api.txt``.

``python tests/test_api.py`` rewrites this file, so that a diff shows the changes.
"""

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import scalax.utils
from scalax.sharding import MeshShardingHelper

SNAPSHOT = Path(__file__).resolve().parent / 'api.txt'
MODULES = [
    'scalax',
    'scalax.axes',
    'scalax.checkpoint',
    'scalax.custom_op',
    'scalax.distributed',
    'scalax.errors',
    'scalax.explain',
    'scalax.interop',
    'scalax.interop.nnx',
    'scalax.jobs',
    'scalax.plan',
    'scalax.rules',
    'scalax.rules.catalogue',
    'scalax.sharding',
    'scalax.testing',
    'scalax.utils',
    'scalax.visualize',
]


def public(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Returns the public names of a module: ``__all__``, or otherwise the names that it defines."""
    names = getattr(module, '__all__', None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith('_') and getattr(value, '__module__', None) == module.__name__
    ]
    return ((name, getattr(module, name)) for name in sorted(names))


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):  # some classes of JAX have no signature
        return ''


def first_line(value: Any) -> str:
    return (inspect.getdoc(value) or '').partition('\n')[0]


def entries(name: str, value: Any) -> Iterator[str]:
    """Yields the lines of a name, and of the public members of a class of scalax."""
    if inspect.ismodule(value):
        return
    ours = getattr(value, '__module__', '').startswith('scalax')
    if not (callable(value) and ours):
        yield f'  {name}: {type(value).__name__}'
        return
    yield f'  {name}{signature(value)}'
    yield f'      {first_line(value)}'
    if not inspect.isclass(value):
        return
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    members = {
        member: attribute
        for base in reversed(value.__mro__)
        if base.__module__.startswith('scalax')
        for member, attribute in vars(base).items()
    }
    for member, attribute in sorted(members.items()):
        if member.startswith('_') or member in fields:
            continue
        plain = inspect.unwrap(getattr(attribute, '__func__', attribute))
        yield f'    .{member}{signature(plain) if callable(plain) else ""}'
        yield f'        {first_line(attribute)}'


def described() -> str:
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines.append(name)
        for entry, value in public(module):
            lines += entries(entry, value)
    return '\n'.join(lines) + '\n'


@pytest.mark.skipif(sys.version_info < (3, 13), reason='Python before 3.13 writes some signatures otherwise')
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason='JAX before 0.12 shows some defaults otherwise')
def test_public_api_equals_the_snapshot() -> None:
    assert described() == SNAPSHOT.read_text(encoding='utf-8')


if __name__ == '__main__':
    SNAPSHOT.write_text(described(), encoding='utf-8')


SIGNATURES = {
    'FSDPShardingRule': ['fsdp_axis_name', 'fsdp_axis_size', 'min_fsdp_size'],
    'PolicyShardingRule': ['policy'],
    'TreePathShardingRule': ['rules', 'strict'],
    'MeshShardingHelper': ['axis_dims', 'axis_names', 'mesh_axis_splitting'],
    'MeshShardingHelper.sjit': [
        *('self', 'fun', 'in_shardings', 'out_shardings', 'static_argnums'),
        *('args_sharding_constraint', 'annotation_shardings'),
    ],
    'MeshShardingHelper.match_sharding_rule': ['self', 'rules', 'tree'],
    'MeshShardingHelper.make_shard_and_gather_fns': ['self', 'tree', 'rules'],
    'MeshShardingHelper.apply_shard_and_gather_fns': ['fns', 'tree'],
    'MeshShardingHelper.local_data_to_global_array': ['self', 'tree', 'batch_axis', 'mesh_axis_subset'],
    'MeshShardingHelper.get_context': ['self', 'annotation_shardings'],
    'MeshShardingHelper.with_sharding_constraint': ['tree', 'rules'],
    'MeshShardingHelper.with_sharding_annotation': ['tree', 'sharding_name'],
    'MeshShardingHelper.get_global_mesh_helper': [],
    'MeshShardingHelper.get_global_mesh': [],
    'MeshShardingHelper.get_global_annotation_shardings': [],
    'with_sharding_constraint': ['tree', 'rules'],
    'with_sharding_annotation': ['tree', 'sharding_name'],
    'get_global_mesh_helper': [],
    'get_global_mesh': [],
    'get_global_annotation_shardings': [],
}


@pytest.mark.parametrize(('name', 'parameters'), SIGNATURES.items(), ids=SIGNATURES)
def test_names_and_parameters_of_0_2_5_are_there(name, parameters):
    value = scalax.sharding
    for part in name.split('.'):
        value = getattr(value, part)
    assert list(inspect.signature(value).parameters)[: len(parameters)] == parameters


X = np.zeros((8, 8), np.float32)


KEYWORDS = {
    'match_sharding_rule': ({'rules': P(), 'tree': X}, {'sharding_rules': P(), 'pytree': X}),
    'shard': ({'tree': X, 'rules': P()}, {'pytree': X, 'rules': P()}),
    'abstract': ({'tree': X, 'rules': P()}, {'pytree': X, 'rules': P()}),
    'explain': ({'tree': X, 'rules': P()}, {'pytree': X, 'rules': P()}),
    'visualize': ({'tree': X, 'rules': P()}, {'tree_or_array': X, 'rules': P()}),
    'gather': ({'tree': X}, {'pytree': X}),
    'make_shard_and_gather_fns': ({'tree': X, 'rules': P()}, {'pytree': X, 'sharding_rule': P()}),
    'apply_shard_and_gather_fns': ({'fns': np.abs, 'tree': X}, {'fns': np.abs, 'pytree': X}),
    'local_data_to_global_array': ({'tree': X}, {'pytree': X}),
    'with_sharding_constraint': ({'tree': X, 'rules': P()}, {'pytree': X, 'sharding_rule': P()}),
    'with_sharding_annotation': ({'tree': X, 'sharding_name': 'a'}, {'pytree': X, 'sharding_name': 'a'}),
}


@pytest.mark.parametrize('name', KEYWORDS)
def test_keyword_names_of_0_2_5_are_accepted(name):
    """All methods take `tree` and `rules`, and also the names that they had in 0.2.5."""
    helper = MeshShardingHelper([4, 2], ['a', 'b'])
    new, old = KEYWORDS[name]
    with helper.get_context():
        results = [getattr(helper, name)(**keywords) for keywords in (new, old)]
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for both in ({**new, **old}, {**new, 'tee': X}) if new != old else ():
        with pytest.raises(TypeError, match='unexpected keyword argument'):
            getattr(helper, name)(**both)


def test_other_names_of_0_2_5_are_there():
    for name in ('Mesh', 'NamedSharding', 'PartitionSpec', 'ShardingRule'):
        assert name in scalax.sharding.__all__
    utils = ['JaxRNG', 'get_float_dtype_by_name', 'float_tensor_to_dtype', 'float_to_dtype']
    utils += ['tree_path_to_string', 'flatten_tree', 'named_tree_map', 'print_pytree_structure']
    assert {*utils} <= {*scalax.utils.__all__}
