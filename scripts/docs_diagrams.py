"""Draws the diagrams of docs/images: SVGs, light and dark, from results of scalax.

Usage, in the development environment: ``python -m scripts.docs_diagrams``.

- ``rules-tree``: a tree of parameters, with the rule and the spec of each leaf (`helper.explain`).
- ``partitioning``: the example of docs/partitioning.md under ``jax.jit`` and under `sjit`: the shardings of
  its activations, and the bytes of its collectives (`helper.plan`).
"""

import contextlib
import html
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np

from scalax.sharding import FSDPShardingRule, MeshShardingHelper, PartitionSpec, TreePathShardingRule

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / 'docs' / 'images'
PAGE = ROOT / 'docs' / 'partitioning.md'

WIDTH = 520
LIGHT = {'text': '#1f2328', 'muted': '#59636e', 'line': '#8c959f', 'box': '#f3f5f8', 'shard': '#4051b5'}
DARK = {'text': '#e6e8ef', 'muted': '#a2a9b8', 'line': '#7a8294', 'box': '#2b2f3d', 'shard': '#8c9eff'}
STYLE = """\
text {{ font: 15px system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; fill: {text} }}
.code {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace }}
.muted {{ fill: {muted} }} .head {{ font-weight: 600 }}
.box {{ fill: {box}; stroke: {line} }} .line {{ stroke: {line}; fill: none }}
.grid {{ fill: {box}; stroke: {line} }} .shard {{ fill: {shard}; stroke: {line} }}
"""


def main() -> int:
    for name, (height, title, parts) in diagrams().items():
        for suffix, colors in (('', LIGHT), ('-dark', DARK)):
            picture = IMAGES / f'{name}{suffix}.svg'
            picture.write_text(svg(height, title, parts, colors), encoding='utf-8')
            print(picture.relative_to(ROOT))
    return 0


def diagrams() -> dict[str, tuple[int, str, list[str]]]:
    """Returns name -> (height, title, elements)."""
    return {'rules-tree': rules_tree(), 'partitioning': partitioning()}


def svg(height: int, title: str, parts: list[str], colors: dict[str, str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    body = [f'<title>{html.escape(title)}</title>', f'<style>\n{STYLE.format(**colors)}</style>', *parts]
    return '\n'.join([head, *body, '</svg>', ''])


def text(x: float, y: float, label: str, kind: str = '', anchor: str = 'start') -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{html.escape(label)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = 'box') -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{kind}"/>'


def arrow(*points: tuple[float, float]) -> str:
    """Returns a line through the points with an arrowhead at its end, pointing right or down."""
    (x, y), (before_x, _) = points[-1], points[-2]
    wings = [(x - 6, y - 4), (x - 6, y + 4)] if before_x < x else [(x - 4, y - 6), (x + 4, y - 6)]
    path = ' '.join(f'{at[0]},{at[1]}' for at in points)
    head = ' '.join(f'{at[0]},{at[1]}' for at in (wings[0], points[-1], wings[1]))
    return f'<polyline class="line" points="{path}"/><polyline class="line" points="{head}"/>'


def blocks(x: float, y: float, width: float, height: float, cuts: tuple[int, int]) -> Iterator[str]:
    """Yields a two-dimensional array divided into blocks; the block of the first device is filled."""
    rows, columns = cuts
    for row in range(rows):
        for column in range(columns):
            kind = 'shard' if row == column == 0 else 'grid'
            size = width / columns, height / rows
            yield box(x + column * size[0], y + row * size[1], *size, kind)


def cuts_of(helper: MeshShardingHelper, spec: Any, dimensions: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of blocks along two dimensions of an array (the second may be missing)."""
    sizes = dict(zip(helper.axis_names, helper.axis_dims, strict=True))

    def cut(number: int) -> int:
        entry = spec[number] if number < len(spec) else None
        axes = entry if isinstance(entry, tuple) else (entry,)
        return int(np.prod([sizes.get(axis, 1) for axis in axes]))

    first, *rest = map(cut, dimensions)
    return first, rest[0] if rest else 1


def rules_tree() -> tuple[int, str, list[str]]:
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    by_path = TreePathShardingRule(
        ('embed|down', PartitionSpec('tp')),
        ('up', PartitionSpec(None, 'tp')),
        ('.*', PartitionSpec()),
    )
    shapes = {'embed': (512, 64), 'mlp': {'down': (256, 64), 'up': (64, 256)}, 'norm': (64,)}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, 'float32'), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    parts = [
        text(0, 18, 'Parameters', 'head'),
        text(126, 18, 'Rule a & b', 'head'),
        text(330, 18, 'Spec on fsdp=4, tp=2', 'head'),
    ]
    top = 34
    for row in helper.explain(params, by_path & FSDPShardingRule(min_fsdp_size=1024)).rows:
        of_path, _, of_size = row.rule.partition(' & ')
        parts += [text(0, top + 24, row.path, 'code'), text(0, top + 44, str(list(row.shape)), 'code muted')]
        parts += [arrow((88, top + 29), (114, top + 29)), box(118, top, 176, 58)]
        parts.append(text(126, top + 24, of_path, 'code'))
        dimension = re.match(r'dimension (\d)', row.reason)
        label = f'& FSDP: dimension {dimension[1]}' if of_size and dimension else '& FSDP: too small'
        parts += [text(126, top + 46, label, 'muted'), arrow((294, top + 29), (322, top + 29))]
        parts.append(text(330, top + 34, str(row.spec), 'code'))
        cuts = cuts_of(helper, row.spec, tuple(range(len(row.shape))))
        width, height = (40, 44) if len(row.shape) == 2 else (9, 44)
        parts += blocks(WIDTH - 21 - width / 2, top + 7, width, height, cuts)
        top += 74
    parts.append(
        text(0, top + 14, 'a: the first regex that matches. b: FSDP, for the free dimensions.', 'muted')
    )
    parts.append(text(0, top + 34, 'Filled: the block of the first device.', 'muted'))
    return top + 44, 'Rules decide about each leaf of a tree of parameters', parts


def partitioning() -> tuple[int, str, list[str]]:
    example, alone = re.findall(
        r'^```python\n(.*?)^```', PAGE.read_text(encoding='utf-8'), re.DOTALL | re.MULTILINE
    )[:2]
    names = run(alone, **run(example))
    helper = names['helper']
    in_shardings, _ = names['alone'].shardings_for(names['params'], names['batch'])
    columns = [
        ('jax.jit: XLA decides', 'alone', shardings_of_jit(example, in_shardings)),
        ('sjit: partitioned', 'step', shardings_of_sjit(names)),
    ]
    parts: list[str] = []
    for left, (title, function, specs) in zip((0, 288), columns, strict=True):
        plan = helper.plan(names[function], names['params'], names['batch'])
        middle = left + 45
        parts.append(text(left, 18, title, 'head'))
        top = 34
        for number, (name, width) in enumerate((('x', 56), ('hidden', 88), ('x', 56))):
            spec = specs[name]
            parts += blocks(middle - width / 2, top, width, 56, cuts_of(helper, spec, (0, 2)))
            parts += [
                text(left + 98, top + 24, name, 'code'),
                text(left + 98, top + 44, str(spec), 'code muted'),
            ]
            if number < 2:
                weights = ('up', 'down')[number]
                parts.append(arrow((middle, top + 58), (middle, top + 114)))
                parts.append(text(left + 54, top + 78, f"@ weights['{weights}']", 'code'))
                sent = sent_by_line(plan, example, f"weights['{weights}']")
                parts.append(text(left + 54, top + 100, f'collectives: {sent:.0f} MiB', 'muted'))
            top += 120
        [totals] = plan.totals.values()
        parts.append(text(left, top - 38, f'{sum(totals.values()) / 2**20:.0f} MiB in a step', 'head'))
    parts.append(text(0, top - 12, 'One layer, with activations of [examples, tokens, features].', 'muted'))
    parts.append(text(0, top + 8, 'Filled: the shard of the first device of eight.', 'muted'))
    return top + 18, 'How the activations of a layer are sharded', parts


def run(block: str, **names: Any) -> dict[str, Any]:
    block = re.sub(r'^jax\.config\.update.*', '', block, flags=re.MULTILINE)  # already initialized
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block, str(PAGE), 'exec', dont_inherit=True), names)
    return names


def shardings_of_jit(block: str, in_shardings: Any) -> dict[str, PartitionSpec]:
    """Returns the shardings that XLA chooses for the activations of a layer under plain ``jax.jit``."""
    seen: dict[str, PartitionSpec] = {}

    def see(**values: jax.Array) -> None:
        for name, value in values.items():

            def put(sharding: Any, name: str = name) -> None:
                seen[name] = sharding.spec

            jax.debug.inspect_array_sharding(value, callback=put)

    changed, times = re.subn(r'( +)(return x \+ hidden)', r'\1see(x=x, hidden=hidden)\n\1\2', block)
    assert times == 1
    names = run(changed, see=see)
    seen.clear()  # of the plans in the block
    step = jax.jit(names['train_step'], in_shardings=in_shardings)
    step.lower(names['params'], names['batch']).compile()
    return seen


def shardings_of_sjit(names: dict[str, Any]) -> dict[str, PartitionSpec]:
    """Returns scalax's shardings of the activations: the batch's, until an operation mixes examples."""
    report = names['step'].explain_propagation(names['params'], names['batch'])
    assert not report.gathered_examples
    return dict.fromkeys(('hidden', 'x'), PartitionSpec(*report.axes))


def sent_by_line(plan: Any, block: str, code: str) -> float:
    """Returns the MiB of the collectives of a line, in the forward and in the backward pass."""
    line = next(
        number
        for number, source_line in enumerate(block.splitlines(), 1)
        if code in source_line and '@' in source_line
    )
    rows = [row for row in plan.collectives if row.source is not None and row.source.line == line]
    return sum(row.count * row.bytes for row in rows) / 2**20


if __name__ == '__main__':
    sys.exit(main())
