"""Random trees, meshes and rules: resolved shardings match placed arrays, and a manual computation."""

import functools
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.paths import NamedTree
from scalax.errors import ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)
from tests.support.random_examples import examples

NAMES = ('a', 'b', 'c')
EXAMPLES = examples(250)


# --- Strategies -----------------------------------------------------------------------------------


@functools.cache
def helper_of(sizes, order, types):
    devices = [jax.devices()[i] for i in order]
    return MeshShardingHelper(sizes, NAMES[: len(sizes)], devices=devices, axis_types=types)


@st.composite
def helpers(draw):
    """Draws a mesh of one to three axes over one to eight devices, in any order and with any axis types."""
    sizes = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, 8 // math.prod(sizes))))
    order = draw(st.permutations(range(8)))[: math.prod(sizes)]
    types = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    return helper_of(tuple(sizes), tuple(order), types)


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 24]), max_size=3).map(tuple)
leaves = st.one_of(
    shapes.map(lambda shape: np.arange(math.prod(shape), dtype=np.int16).reshape(shape)),
    shapes.map(lambda shape: np.ones(shape, np.float32)),
    st.just(3),
    st.just(None),
)
keys = st.sampled_from(['w', 'b', 'layers', 'a/b', '', '0'])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


@st.composite
def specs(draw, names, rank):
    """Draws a spec that uses each mesh axis at most once, for an array of *rank* dimensions."""
    free = draw(st.permutations(names))
    entries = []
    for _ in range(draw(st.integers(0, rank))):
        count = draw(st.integers(0, 2))
        entry_axes, free = free[:count], free[count:]
        entries.append(draw(st.sampled_from([None, ()])) if not entry_axes else tuple(entry_axes))
    return P(*[entry[0] if entry and len(entry) == 1 else entry for entry in entries])


@st.composite
def spec_tables(draw, names):
    """Draws one spec for every rank."""
    return [draw(specs(names, rank)) for rank in range(4)]


# --- Reference ------------------------------------------------------------------------------------


def axes_of(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def part_by_hand(shape, spec, sizes):
    """Returns the local shape, with axes dropped from the right until the dimensions are divisible."""
    part = list(shape)
    for dim, entry in enumerate(spec):
        axes = axes_of(entry)
        while shape[dim] % math.prod(sizes[a] for a in axes):
            axes = axes[:-1]
        part[dim] //= math.prod(sizes[a] for a in axes)
    return tuple(part)


def divides(shape, spec, sizes):
    dims = zip(shape, map(axes_of, spec), strict=False)
    return all(n % math.prod(sizes[a] for a in axes) == 0 for n, axes in dims)


def assert_parts(helper, tree, rules, parts):
    """Asserts that resolving, placing and fetching agree with the reference shapes, one for each leaf."""
    shardings = helper.match_sharding_rule(rules, tree)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(tree)]
    actual = [s.shard_shape(n) for s, n in zip(jax.tree.leaves(shardings), shapes, strict=True)]
    assert actual == parts
    assert all(not s.spec or s.spec[-1] is not None for s in jax.tree.leaves(shardings))

    placed = jax.device_put(tree, shardings)
    for leaf, sharding, part in zip(*map(jax.tree.leaves, (placed, shardings)), parts, strict=True):
        assert leaf.sharding == sharding
        assert {shard.data.shape for shard in leaf.addressable_shards} == {part}
        assert len(leaf.addressable_shards) == helper.mesh.size
    for leaf, back in zip(*map(jax.tree.leaves, (tree, helper.gather(placed))), strict=True):
        np.testing.assert_array_equal(back, leaf)

    sizes = [
        math.prod(part) * leaf.dtype.itemsize
        for part, leaf in zip(parts, jax.tree.leaves(placed), strict=True)
    ]
    assert helper.explain(tree, rules).bytes_per_device == sum(sizes)
    # Shardings are rules that return themselves.
    again = helper.match_sharding_rule(shardings, tree)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (shardings, again)), strict=True))


# --- Properties -----------------------------------------------------------------------------------


class Table(ShardingRule):
    """A user's rule: a spec by rank."""

    def __init__(self, table, helper):
        self.table, self.sizes = table, dict(helper.mesh.shape)

    def apply(self, pytree):
        def spec(leaf):
            spec = self.table[np.ndim(leaf)]
            return spec if divides(np.shape(leaf), spec, self.sizes) else P()

        return jax.tree.map(spec, pytree)


@pytest.mark.medium
@EXAMPLES
@hypothesis.given(helper=helpers(), tree=trees, data=st.data())
def test_policies_and_tree_paths(helper, tree, data):
    table = data.draw(spec_tables(helper.axis_names))
    sizes = dict(helper.mesh.shape)
    by_rank = PolicyShardingRule(lambda path, leaf: table[len(leaf.shape)], on_indivisible='replicate')
    named = NamedTree.of(tree)
    parts = [part_by_hand(shape, table[len(shape)], sizes) for shape in named.shapes]
    assert_parts(helper, tree, by_rank, parts)

    nested = TreePathShardingRule(('w', by_rank), ('b|0', P()), strict=False)
    by_path = []
    for path, shape, part in zip(named.paths, named.shapes, parts, strict=True):
        is_matched = 'w' in path and math.prod(shape) != 1
        by_path.append(part if is_matched else shape)
    assert_parts(helper, tree, nested, by_path)


@pytest.mark.medium
@EXAMPLES
@hypothesis.given(helper=helpers(), tree=trees, data=st.data())
def test_rules_of_users(helper, tree, data):
    rule = Table(data.draw(spec_tables(helper.axis_names)), helper)
    sizes = dict(helper.mesh.shape)
    parts = [
        part_by_hand(shape, rule.table[len(shape)], sizes)
        if divides(shape, rule.table[len(shape)], sizes)
        else shape
        for shape in NamedTree.of(tree).shapes
    ]
    assert_parts(helper, tree, rule, parts)


@pytest.mark.medium
@EXAMPLES
@hypothesis.given(helper=helpers(), tree=trees, minimum=st.sampled_from([0, 2, 10, 100]), data=st.data())
def test_fsdp(helper, tree, minimum, data):
    axes = tuple(data.draw(st.lists(st.sampled_from(helper.axis_names), min_size=1, max_size=2, unique=True)))
    count = math.prod(helper.mesh.shape[axis] for axis in axes)
    size = data.draw(st.sampled_from([None, count]))

    def part(shape):
        candidates = [n for n in shape if n and n % count == 0]
        if math.prod(shape) < minimum or not candidates:
            return shape
        dim = shape.index(max(candidates))
        return tuple(n // count if i == dim else n for i, n in enumerate(shape))

    rule = FSDPShardingRule(axes if len(axes) > 1 else axes[0], size, minimum)
    assert_parts(helper, tree, rule, [part(shape) for shape in NamedTree.of(tree).shapes])


@pytest.mark.medium
@EXAMPLES
@hypothesis.given(helper=helpers(), tree=trees, data=st.data())
def test_only_leaves_that_do_not_divide_are_named(helper, tree, data):
    table = data.draw(spec_tables(helper.axis_names))
    rule = PolicyShardingRule(lambda path, leaf: table[len(leaf.shape)])
    named = NamedTree.of(tree)
    sizes = dict(helper.mesh.shape)
    wrong = [
        named.describe(i)
        for i, shape in enumerate(named.shapes)
        if not divides(shape, table[len(shape)], sizes)
    ]
    if wrong:
        with pytest.raises(ShardingError) as error:
            helper.match_sharding_rule(rule, tree)
        assert list(dict.fromkeys(p.leaf for p in error.value.problems)) == list(dict.fromkeys(wrong))
        assert str(error.value)
    else:
        assert_parts(helper, tree, rule, [part_by_hand(s, table[len(s)], sizes) for s in named.shapes])


@pytest.mark.medium
@EXAMPLES
@hypothesis.given(helper=helpers(), tree=st.dictionaries(keys, trees, min_size=1, max_size=4), data=st.data())
def test_trees_of_rules(helper, tree, data):
    sizes = dict(helper.mesh.shape)
    tables = {key: data.draw(spec_tables(helper.axis_names)) for key in tree}
    rules = {
        key: PolicyShardingRule(lambda path, leaf, t=table: t[len(leaf.shape)], on_indivisible='replicate')
        for key, table in tables.items()
    }
    parts = [
        part_by_hand(shape, tables[key][len(shape)], sizes)
        for key in sorted(tree)
        for shape in NamedTree.of(tree[key]).shapes
    ]
    assert_parts(helper, tree, rules, parts)


@pytest.mark.medium
@pytest.mark.parametrize('count', [1, 3, 5, 6, 7])
@EXAMPLES
@hypothesis.given(rows=st.integers(0, 40), columns=st.integers(1, 9))
def test_odd_numbers_of_devices(count, rows, columns):
    helper = helper_of((count,), tuple(range(count)), AxisType.Auto)
    array = np.arange(rows * columns).reshape(rows, columns)
    helper_replicates = MeshShardingHelper.from_mesh(helper.mesh, on_indivisible='replicate')
    placed = helper_replicates.shard(array, P('a'))
    expected = rows // count if rows % count == 0 else rows
    assert {shard.data.shape for shard in placed.addressable_shards} == {(expected, columns)}
    np.testing.assert_array_equal(placed, array)
