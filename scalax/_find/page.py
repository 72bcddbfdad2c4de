"""What was found, as a page: the rule, what each place saves, the meshes that were tried, and the plan."""

from __future__ import annotations

from scalax._find.outcome import FoundData
from scalax._find.source import rule_code
from scalax._find.text import SAVED, TRIED, group_table, head, mesh_table
from scalax._plan.page import headline, plan_blocks
from scalax._report import blocks
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
            blocks.section(SAVED, blocks.table(*group_table(found))),
            memory_against_seconds(alternatives(found), found.plan.memory.limit),
            blocks.section(TRIED, blocks.table(*mesh_table(found), best=0)),
        ]
    )


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
