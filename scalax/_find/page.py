"""What was found, as a page: the rule, what each place saves, the meshes that were tried, and the plan."""

from __future__ import annotations

from scalax._find.outcome import FoundData
from scalax._find.source import rule_code
from scalax._find.text import SAVED, TRIED, group_table, head, mesh_table
from scalax._plan.page import headline, plan_blocks
from scalax._report import blocks


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
            blocks.section(TRIED, blocks.table(*mesh_table(found), best=0)),
        ]
    )
