"""Python source: of a rule, and of the program that uses what was found."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._planning.autoshard.layout import Layout
from scalax._planning.autoshard.problem import Problem
from scalax._spmd.pipelines.config import options_text
from scalax.rules import TreePathShardingRule

_WIDTH = 88  # of black, and of ruff unless told otherwise
_IMPORTS = """\
from scalax.sharding import MeshShardingHelper, {}TreePathShardingRule
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
    text = re.sub(r'(?<=[(, ])UNCONSTRAINED\b', 'P.UNCONSTRAINED', partition_specs.text(spec))
    return f'{text.removesuffix(",)")})' if text.endswith(',)') else text


def program_code(problem: Problem, layout: Layout, topology: str | None, rule: TreePathShardingRule) -> str:
    """Python source of the step of a problem, as it runs with a layout."""
    step = problem.step
    names, dims = zip(*layout.mesh, strict=True)
    mesh = f'{[*dims]}, {[*names]}, mesh_axis_splitting=True'
    if problem.slices > 1:
        mesh += f', dcn_axis_dims={[problem.slices if name == problem.axes.slices else 1 for name in names]}'
    where = (
        '' if topology is None else f'# Found for {topology!r}: it takes {math.prod(dims)} such devices.\n'
    )
    of_batch = problem.of_batch(layout)

    def batch_code(shape: tuple[int, ...]) -> _Source:
        spec = of_batch(shape)
        return _Source('batch' if spec == layout.batch else spec_code(spec))

    given = tuple(map(_one_or_tree, step.arguments(lambda leaf: _Source('rule'), batch_code)))
    named = hasattr(step.function, '__name__') and step.name.isidentifier()  # a partial has none
    pipeline = ''
    if layout.pipeline is not None:
        options = options_text(layout.pipeline)
        pipeline = f'    pipeline=Pipeline({layout.pipeline.axis!r}, {options}),\n'
    return (
        f'{_IMPORTS.format("Pipeline, " if pipeline else "")}\n{rule_code(rule)}\n'
        f'{where}helper = MeshShardingHelper({mesh})\n'
        f'batch = {spec_code(layout.batch)}\n'
        'step = helper.sjit(\n'
        f'    {step.name if named else "your_step"},\n'
        f'    in_shardings={given},\n'
        f'    out_shardings={step.returned(given)},\n'
        f'    donate_argnums={tuple(sorted(step.donated))},\n'
        f'    batch_argnums={problem.batch_argnums(layout)},\n'
        f'{pipeline}'
        ')\n'
        '# To compare its results with one device:\n'
        '# print(helper.verify(step, *arguments))\n'
    )


class _Source(str):
    """Source; the repr of a tree shows it without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _one_or_tree(tree: Any) -> _Source:
    sources = {*jax.tree.leaves(tree)}
    return _Source(sources.pop() if len(sources) == 1 else repr(tree))


def _regex_code(regex: str) -> str:
    raw = '\\' in regex and regex.isprintable() and "'" not in regex and not regex.endswith('\\')
    return f"r'{regex}'" if raw else repr(regex)
