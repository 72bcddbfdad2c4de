"""Python source: of a rule, and of the program that uses what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._find.layout import Layout, spec_of
from scalax._find.problem import Problem
from scalax._tree import specs
from scalax._tree.paths import leaf_shape
from scalax.rules import TreePathShardingRule

_WIDTH = 88  # of black, and of ruff unless told otherwise
_IMPORTS = """\
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
"""


def rule_code(rule: TreePathShardingRule) -> str:
    r"""Python source that makes a rule of strings and specs again, in the style of ruff and black.

    Example:
        >>> print(rule_code(TreePathShardingRule((r'layers/\d+/w', PartitionSpec('x')))))
        rule = TreePathShardingRule(
            (r'layers/\d+/w', P('x')),
        )
        <BLANKLINE>
    """
    lines = []
    for regex, spec in rule.rules:
        assert isinstance(regex, str) and isinstance(spec, PartitionSpec)
        pair = _regex_code(regex), spec_code(spec)
        line = f'    ({pair[0]}, {pair[1]}),'
        if len(line) > _WIDTH:
            line = f'    (\n        {pair[0]},\n        {pair[1]},\n    ),'
        lines.append(line)
    return '\n'.join(['rule = TreePathShardingRule(', *lines, ')', ''])


def spec_code(spec: PartitionSpec) -> str:
    """Python source of a spec, with P for PartitionSpec."""
    text = re.sub(r'(?<=[(, ])UNCONSTRAINED\b', 'P.UNCONSTRAINED', specs.text(spec))
    return f'{text.removesuffix(",)")})' if text.endswith(',)') else text


def program_code(problem: Problem, layout: Layout, topology: str | None, rule: TreePathShardingRule) -> str:
    """Python source of the first step of a problem, as it runs with a layout."""
    step, batch = problem.steps[0], spec_of(layout.batch)
    dims, names = [*layout.sizes.values()], [*layout.sizes]
    slices = ''
    if problem.slices > 1:
        dcn = [problem.slices if name == problem.axes.slices else 1 for name in names]
        slices = f', num_slices={problem.slices}, dcn_axis_dims={dcn}'
    if topology is None:
        helper = f'MeshShardingHelper({dims}, {names}, mesh_axis_splitting=True)'
    else:
        helper = (
            'MeshShardingHelper.from_topology(\n'
            f'    {topology!r}, {dims}, {names}, mesh_axis_splitting=True{slices}\n)'
        )
    of_batch = problem.of_batch(layout)
    given = [
        _batch_code(argument, batch, of_batch) if i in step.batch else 'rule'
        for i, argument in enumerate(step.args)
    ]
    returned = ['None' if like is None else given[like] for like in step.like]
    if step.one_result:
        results = returned[0]
    elif isinstance(step.out, dict):
        pairs = zip(step.out, returned, strict=True)
        results = '{' + ', '.join(f'{name!r}: {each}' for name, each in pairs) + '}'
    else:
        kind = type(step.out).__name__ if hasattr(step.out, '_fields') else ''
        results = f'{kind}({", ".join(returned)}{"," * (len(returned) == 1)})'
    named = hasattr(step.function, '__name__') and step.name.isidentifier()  # a partial has none
    name = step.name if named else 'your_step'
    return (
        f'{_IMPORTS}\n{rule_code(rule)}\n'
        f'helper = {helper}\n'
        f'batch = {spec_code(batch)}\n'
        'step = helper.sjit(\n'
        f'    {name},\n'
        f'    in_shardings=({", ".join(given)}{"," * (len(given) == 1)}),\n'
        f'    out_shardings={results},\n'
        f'    donate_argnums={tuple(sorted(step.donated))},\n'
        f'    batch_argnums={problem.batch_argnums(layout, step)},\n'
        ')\n'
    )


class _Source(str):
    """Source; the repr of a tree shows it without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _batch_code(argument: Any, batch: PartitionSpec, of_batch: Callable[[tuple[int, ...]], Any]) -> str:
    """The specs of a batch: one for all arrays, or a tree of them if some have other ones."""
    tree = jax.tree.map(lambda leaf: _Source(spec_code(of_batch(leaf_shape(leaf) or ()))), argument)
    same = all(source == spec_code(batch) for source in jax.tree.leaves(tree))
    return 'batch' if same else repr(tree)


def _regex_code(regex: str) -> str:
    raw = '\\' in regex and regex.isprintable() and "'" not in regex and not regex.endswith('\\')
    return f"r'{regex}'" if raw else repr(regex)
