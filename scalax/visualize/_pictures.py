"""The pictures of a tree: one for each shape and sharding of its leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, Sharding

from scalax._core.pytree import partition_specs, spec_validation
from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.paths import NamedTree, has_foreign_dtype, leaf_shape
from scalax._core.render.tables import array_text
from scalax._core.util.folding import MOST_RUNS, Fold, count_prefix, fold
from scalax.errors import Problem, ShardingError, module_advice, plural, shown_leaves
from scalax.visualize._blocks import Blocks, blocks_of

_RULES_HINT = 'give rules as well: helper.visualize(tree, rules) shows where they would place each leaf.'
_TRACED_HINT = (
    'look at arguments and results outside the function, or at values inside with '
    'jax.debug.inspect_array_sharding(x, callback=...), which gets the sharding.'
)


@dataclasses.dataclass(frozen=True)
class Member:
    """Leaves whose paths differ only in numbers.

    Attributes:
        name: the paths as one: ``layers/{0..79}/w``.
        count: the number of leaves.
        dtype: the name of the dtype.
        fold: the paths.
    """

    name: str
    count: int
    dtype: str
    fold: Fold


@dataclasses.dataclass(frozen=True)
class Picture:
    """Leaves of one shape and sharding.

    Attributes:
        members: the leaves.
        blocks: the blocks of each leaf, and the devices that hold them.
    """

    members: tuple[Member, ...]
    blocks: Blocks

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf."""
        return tuple(path for member in self.members for path in member.fold.paths)

    @property
    def count(self) -> int:
        """The number of leaves."""
        return sum(member.count for member in self.members)


def pictures_of(pytree: Any) -> tuple[Picture, ...]:
    """Returns a picture for each shape and sharding, in the order of the first leaf of each.

    Raises:
        ShardingError: some leaves have no sharding that can be shown; the message names all of them.
    """
    tree = NamedTree.of(pytree)
    shardings = [_sharding(leaf) for leaf in tree.leaves]
    problems = [
        Problem(fault.kind, tree.describe(index), fault.detail, hint=fault.hint)
        for index, fault in enumerate(shardings)
        if isinstance(fault, spec_validation.Fault)
    ]
    if problems:
        raise _error(problems)
    layouts = [
        (shape, _sharding_key(sharding)) for shape, sharding in zip(tree.shapes, shardings, strict=True)
    ]
    dtypes = [str(leaf.dtype) for leaf in tree.leaves]
    folds_by_layout: dict[Hashable, list[Fold]] = {}
    for item in fold(zip(tree.paths, zip(layouts, dtypes, strict=True), strict=True)):
        folds_by_layout.setdefault(layouts[item.first], []).append(item)
    pictures = []
    for folds in folds_by_layout.values():
        first = folds[0].first
        sharding = shardings[first]
        assert isinstance(sharding, Sharding)
        members = tuple(
            Member(item.short_name(MOST_RUNS), item.count, dtypes[item.first], item) for item in folds
        )
        pictures.append(Picture(members, blocks_of(sharding, tree.shapes[first])))
    return tuple(pictures)


def _sharding_key(sharding: Hashable) -> Hashable:
    """Returns a key that is equal for equivalent shardings, such as ``P('x')`` and ``P('x', None)``."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh, partition_specs.canonical(sharding.spec), sharding.memory_kind
    return sharding


def _sharding(leaf: Any) -> Sharding | spec_validation.Fault:
    """Returns the sharding of a leaf, or the reason why it cannot be shown."""
    if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
        return spec_validation.Fault(
            'not-an-array', 'this is not an array', f'visualize a tree of arrays only.{module_advice([leaf])}'
        )
    is_traced = isinstance(leaf, jax.core.Tracer)
    sharding = jax.typeof(leaf).sharding if is_traced else getattr(leaf, 'sharding', None)
    if is_traced and not _is_explicit(sharding):
        return spec_validation.Fault(
            'traced', 'only the compiler will know where this traced value is placed', _TRACED_HINT
        )
    is_untyped = isinstance(leaf, jax.core.ShapedArray) and not _is_explicit(sharding)
    if not isinstance(sharding, Sharding) or is_untyped:
        return spec_validation.Fault(
            'no-sharding', 'this has no sharding, because it is not on a device yet', _RULES_HINT
        )
    if not isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return spec_validation.Fault('no-sharding', f'its {type(sharding).__name__} has no spec', _RULES_HINT)
    if isinstance(sharding, NamedSharding) and partition_specs.UNCONSTRAINED in partition_specs.entries(
        sharding.spec
    ):
        return spec_validation.Fault(
            'unconstrained',
            f'{partition_specs.text(sharding.spec)} leaves a dimension to the compiler',
            'show the array that the compiler returns, or name mesh axes or None for that dimension.',
        )
    return sharding


def _is_explicit(sharding: Any) -> bool:
    """Whether all mesh axes are Explicit, so that the type of a traced value determines its sharding."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return False
    return set(MeshAxes.of(sharding.mesh).types.values()) == {AxisType.Explicit}


def _error(problems: Sequence[Problem]) -> ShardingError:
    count = plural(len(problems), 'leaf has', 'leaves have')
    lines = [f'{count} no sharding that could be shown:']
    lines.append(shown_leaves(f'{problem.leaf}: {problem.detail}' for problem in problems))
    hints = dict.fromkeys(problem.hint for problem in problems)
    lines.extend(f'What to do: {hint}' for hint in hints)
    return ShardingError(problems, message='\n'.join(lines))


def member_text(picture: Picture, member: Member) -> str:
    """Returns the text of a member in pictures: ``layers/{0..79}/w: 80 x float32[8,16]``."""
    name = f'{member.name}: ' if member.name else ''
    return f'{name}{count_prefix(member.count)}{array_text(member.dtype, picture.blocks.shape)}'
