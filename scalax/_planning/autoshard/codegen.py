"""Python source of a rule, and of a program that runs a step with a layout."""

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

_WIDTH = 88  # the default of black and ruff
_IMPORTS = """\
from scalax.sharding import MeshShardingHelper, {}TreePathShardingRule
from scalax.sharding import PartitionSpec as P
"""


def rule_code(rule: TreePathShardingRule) -> str:
    r"""Returns Python source of a rule of strings and specs, in the style of ruff and black.

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
    """Returns Python source of a spec, with P for PartitionSpec."""
    text = re.sub(r'(?<=[(, ])UNCONSTRAINED\b', 'P.UNCONSTRAINED', partition_specs.text(spec))
    return f'{text.removesuffix(",)")})' if text.endswith(',)') else text


def program_code(problem: Problem, layout: Layout, topology: str | None, rule: TreePathShardingRule) -> str:
    """Returns Python source that makes the helper and the sharded step of a layout."""
    step = problem.step
    names, dims = zip(*layout.mesh, strict=True)
    mesh = f'{[*dims]}, {[*names]}, mesh_axis_splitting=True'
    if problem.num_slices > 1:
        mesh += f', dcn_axis_dims={[problem.num_slices if name == problem.axes.dcn else 1 for name in names]}'
    comment = (
        '' if topology is None else f'# Found for {topology!r}: it needs {math.prod(dims)} such devices.\n'
    )
    batch_spec_of = problem.batch_spec_of(layout)

    def batch_code(shape: tuple[int, ...]) -> _Source:
        spec = batch_spec_of(shape)
        return _Source('batch' if spec == layout.batch_spec else spec_code(spec))

    trees = step.map_arguments(lambda leaf: _Source('rule'), batch_code)
    in_shardings = tuple(map(_one_or_tree, trees))
    has_name = hasattr(step.function, '__name__') and step.name.isidentifier()  # not so a functools.partial
    pipeline = ''
    if layout.pipeline is not None:
        options = options_text(layout.pipeline)
        pipeline = f'    pipeline=Pipeline({layout.pipeline.axis!r}, {options}),\n'
    return (
        f'{_IMPORTS.format("Pipeline, " if pipeline else "")}\n{rule_code(rule)}\n'
        f'{comment}helper = MeshShardingHelper({mesh})\n'
        f'batch = {spec_code(layout.batch_spec)}\n'
        'step = helper.sjit(\n'
        f'    {step.name if has_name else "your_step"},\n'
        f'    in_shardings={in_shardings},\n'
        f'    out_shardings={step.map_results(in_shardings)},\n'
        f'    donate_argnums={tuple(sorted(step.donate_argnums))},\n'
        f'    batch_argnums={problem.batch_argnums(layout)},\n'
        f'{pipeline}'
        ')\n'
        '# To compare its results with one device:\n'
        '# print(helper.verify(step, *arguments))\n'
    )


class _Source(str):
    """Source code whose repr, as in the repr of a tree, has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _one_or_tree(tree: Any) -> _Source:
    sources = {*jax.tree.leaves(tree)}
    return _Source(sources.pop() if len(sources) == 1 else repr(tree))


def _regex_code(regex: str) -> str:
    raw = '\\' in regex and regex.isprintable() and "'" not in regex and not regex.endswith('\\')
    return f"r'{regex}'" if raw else repr(regex)
