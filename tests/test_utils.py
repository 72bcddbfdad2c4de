"""RNG keys, float dtypes, named trees."""

import collections
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.errors import ArgumentError, RuleError
from scalax.utils import (
    JaxRNG,
    flatten_tree,
    float_tensor_to_dtype,
    float_to_dtype,
    get_float_dtype_by_name,
    named_tree_map,
    print_pytree_structure,
    tree_path_to_string,
)
from tests.support.threads import COUNT, in_threads

Point = collections.namedtuple('Point', ['x', 'y'])


# --- JaxRNG ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('make', [jax.random.PRNGKey, jax.random.key])
def test_rng_gives_the_keys_of_0_2_5(make):
    rng = JaxRNG(make(3))
    state, first = jax.random.split(make(3))
    np.testing.assert_array_equal(jax.random.uniform(rng()), jax.random.uniform(first))

    split = jax.random.split(state, 3)
    pair = rng(2)
    assert isinstance(pair, tuple)
    np.testing.assert_array_equal(jax.random.uniform(pair[1]), jax.random.uniform(split[2]))

    split = jax.random.split(split[0], 3)
    named = rng(['params', 'dropout'])
    assert list(named) == ['params', 'dropout']
    np.testing.assert_array_equal(jax.random.uniform(named['dropout']), jax.random.uniform(split[2]))


@pytest.mark.parametrize(
    ('keys', 'result'),
    [(np.int64(2), tuple), (0, tuple), (('a', 'b'), dict), ({'a': 1}, dict), (iter('ab'), dict), ([], dict)],
)
def test_rng_takes_numbers_and_names(keys, result):
    assert isinstance(JaxRNG.from_seed(0)(keys), result)


@pytest.mark.parametrize('keys', [-1, np.int32(-2), 2.5, object, 'dropout', b'dropout'])
def test_rng_rejects_invalid_arguments(keys):
    with pytest.raises(ArgumentError) as error:
        JaxRNG.from_seed(0)(keys)
    assert str(error.value) == f'JaxRNG takes a number of keys or a list of names, got {keys!r}'


@pytest.mark.medium
@pytest.mark.parametrize('keys', [None, 2, ['params', 'dropout']])
def test_rng_gives_threads_distinct_keys(keys):
    rng, draws = JaxRNG.from_seed(0), 20
    keys_of_threads = jax.tree.leaves(in_threads(lambda _: [rng(keys) for _ in range(draws)]))
    assert len(keys_of_threads) == COUNT * draws * (1 if keys is None else 2)
    assert len({np.asarray(key).tobytes() for key in keys_of_threads}) == len(keys_of_threads)


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy, lambda rng: pickle.loads(pickle.dumps(rng))])
def test_rng_can_be_copied(copied):
    rng = JaxRNG.from_seed(0)
    np.testing.assert_array_equal(copied(rng)(), rng())


@pytest.mark.medium
def test_rng_is_pure_inside_jit():
    def draw(key):
        rng = JaxRNG(key)
        return jax.random.normal(rng()), jax.random.normal(rng())

    first, second = jax.jit(draw)(jax.random.key(0))
    assert first != second
    assert (first, second) == draw(jax.random.key(0))


def test_the_global_rng(monkeypatch):
    monkeypatch.setattr(JaxRNG, 'global_rng_generator', None)
    with pytest.raises(RuntimeError, match=r'call JaxRNG.init_global_rng\(seed\) before JaxRNG.next_rng\(\)'):
        JaxRNG.next_rng()
    JaxRNG.init_global_rng(5)
    rng = JaxRNG.from_seed(5)
    np.testing.assert_array_equal(JaxRNG.next_rng(), rng())
    np.testing.assert_array_equal(JaxRNG.next_rng(keys=2), rng(2))


# --- Float dtypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('bf16', jnp.bfloat16),
        ('bfloat16', jnp.bfloat16),
        ('fp16', jnp.float16),
        ('float16', jnp.float16),
        ('fp32', jnp.float32),
        ('float32', jnp.float32),
        ('fp64', jnp.float64),
        ('float64', jnp.float64),
    ],
)
def test_dtype_names(name, dtype):
    assert get_float_dtype_by_name(name) == dtype


def test_unknown_dtype_names():
    with pytest.raises(KeyError) as error:
        get_float_dtype_by_name('float23')
    assert error.value.args == ("no float dtype 'float23' (did you mean 'float32' or 'float64'?)",)


@pytest.mark.parametrize(
    ('tensor', 'dtype', 'result'),
    [
        (np.ones(2, np.float32), 'bf16', 'bfloat16'),
        (np.ones(2, np.float64), jnp.float16, 'float16'),
        (jnp.ones(2, jnp.bfloat16), 'fp32', 'float32'),
        (np.float32(1), 'bf16', 'bfloat16'),
        (np.ones(2, np.float32), None, 'float32'),
        (np.ones(2, np.float32), '', 'float32'),
        (np.ones(2, np.int32), 'bf16', 'int32'),
        (np.ones(2, bool), 'bf16', 'bool'),
        (np.ones(2, complex), 'bf16', 'complex128'),
        (np.ones(2, jnp.float8_e4m3fn), 'bf16', 'float8_e4m3fn'),
    ],
)
def test_casting(tensor, dtype, result):
    assert float_tensor_to_dtype(tensor, dtype).dtype == np.dtype(result)


@pytest.mark.parametrize('other', [None, 'text', 1.5, jax.random.key(0)], ids=str)
def test_other_leaves_are_returned_unchanged(other):
    assert float_tensor_to_dtype(other, 'bf16') is other


def test_casting_trees():
    key = jax.random.key(0)
    tree = {'w': np.ones(2, np.float32), 'step': np.int32(3), 'rng': key, 'none': None, 'name': 'x'}
    cast = float_to_dtype(tree, 'bf16')
    assert cast['w'].dtype == jnp.bfloat16
    assert {k: cast[k] is tree[k] for k in tree} == dict.fromkeys(tree, True) | {'w': False}


# --- Named trees ----------------------------------------------------------------------------------

TREE = {'a': {'b': 1, 'c': [2, 3]}, 'p': Point(4, None)}


@pytest.mark.parametrize(
    ('sep', 'paths'),
    [
        ('/', ['a/b', 'a/c/0', 'a/c/1', 'p/x']),
        ('.', ['a.b', 'a.c.0', 'a.c.1', 'p.x']),
        ('', ['ab', 'ac0', 'ac1', 'px']),
        (None, [('a', 'b'), ('a', 'c', '0'), ('a', 'c', '1'), ('p', 'x')]),
    ],
)
def test_paths(sep, paths):
    flat, _ = jax.tree_util.tree_flatten_with_path(TREE)
    assert [tree_path_to_string(path, sep=sep) for path, _ in flat] == paths
    assert flatten_tree(TREE, sep=sep) == dict(zip(paths, [1, 2, 3, 4], strict=True))
    seen = []
    named_tree_map(lambda path, x: seen.append(path), TREE, sep=sep)
    assert seen == paths


def test_is_leaf_and_more_trees():
    def is_pair(x):
        return isinstance(x, Point)

    assert flatten_tree({'p': Point(1, 2)}, is_leaf=is_pair, sep='/') == {'p': Point(1, 2)}
    named = named_tree_map(
        lambda *args: args, {'p': Point(1, 2)}, {'p': Point(3, 4)}, is_leaf=is_pair, sep='/'
    )
    assert named == {'p': ('p', Point(1, 2), Point(3, 4))}


def test_paths_that_collide():
    tree = {'a/b': 1, 'a': {'b': 2}}
    with pytest.raises(RuleError) as error:
        flatten_tree(tree, sep='/')
    assert str(error.value) == "two leaves have the path 'a/b': rename a key, or pass sep=None"
    assert flatten_tree(tree) == {('a/b',): 1, ('a', 'b'): 2}


def test_print_pytree_structure(capsys, snapshot):
    print_pytree_structure({'w': np.zeros((2, 3), np.float32), 'rng': jax.random.key(0), 'n': 'x', 'i': 1})
    snapshot(capsys.readouterr().out)
    print_pytree_structure({'a': [1]}, sep='.')
    assert capsys.readouterr().out == 'a.0: shape: none, dtype: none\n'
