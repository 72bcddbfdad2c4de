"""What was found, as a page: the rule, what each place saves, the meshes that were tried, and the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scalax._find.outcome import FoundData
from scalax._find.source import rule_code
from scalax._find.text import GROUP_HEADS, MESH_HEADS, SAVED, TRIED, group_cells, head, mesh_cells
from scalax._plan.page import headline, plan_blocks
from scalax._report import blocks
from scalax._report.blocks import Cell, Column
from scalax._report.memory_seconds import Alternative, memory_against_seconds
from scalax._tree.specs import axis_sizes_text


def render_page(found: FoundData, title: str) -> str:
    """The page, with the plan at its end."""
    return blocks.page(title, _blocks(found, title) + plan_blocks(found.plan, 'The plan', level=2))


def render_fragment(found: FoundData) -> str:
    """What was found, for a notebook, without the plan."""
    return blocks.fragment(_blocks(found, f'A rule for {found.plan.name}'))


def _blocks(found: FoundData, title: str) -> str:
    return ''.join(
        [
            blocks.heading(title, found.mesh, f'on {found.topology}' if found.topology else ''),
            blocks.figures(headline(found.plan, found.plan.known_roofline)),
            blocks.notes(head(found)),
            blocks.section('The rule', blocks.code_block(rule_code(found.rule))),
            blocks.section(SAVED, _groups(found)),
            memory_against_seconds(alternatives(found), found.plan.memory.limit),
            blocks.section(TRIED, _meshes(found)),
        ]
    )


def _groups(found: FoundData) -> str:
    columns = _columns(GROUP_HEADS, ['lead', 'code', 'code', 'number', 'number', 'wide'])
    rows = []
    for group, texts in zip(found.groups, group_cells(found), strict=True):
        is_known = group.next_spec is not None
        keys = {3: group.seconds, 4: group.memory} if is_known else {}
        rows.append([Cell(text, keys.get(column)) for column, text in enumerate(texts)])
    return blocks.table(columns, rows)


def _meshes(found: FoundData) -> str:
    columns = _columns(MESH_HEADS, ['lead', 'code', 'number', 'number', 'number', 'number', 'wide'])
    rows = []
    for row, texts in zip(found.meshes, mesh_cells(found), strict=True):
        keys = {2: row.mean, 3: row.bound, 4: row.estimate, 5: row.memory}
        rows.append([Cell(text, keys.get(column)) for column, text in enumerate(texts)])
    return blocks.table(columns, rows, best=0)


def _columns(heads: Sequence[str], kinds: Iterable[blocks.Kind]) -> list[Column]:
    return [Column(text, kind) for text, kind in zip(heads, kinds, strict=True)]


def alternatives(found: FoundData) -> list[Alternative]:
    """The best layout of each mesh and placement of the batch."""
    return [
        Alternative(
            f'{axis_sizes_text(row.mesh)}, batch {row.batch}',
            row.memory,
            row.bound,
            row.estimate,
            False if row.lost.startswith('does not fit') else None,
            not row.lost,
        )
        for row in found.meshes
        if row.bound is not None and row.estimate is not None
    ]
