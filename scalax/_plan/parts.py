"""Parts of a training step: what is forward, what is backward, and what is computed again.

JAX writes the transformations that made an operation into its name, so in programs and in jaxprs alike:
``jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot_general``.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Part = Literal['other', 'forward', 'backward', 'recomputed']
PARTS: tuple[Part, ...] = get_args(Part)
# Names of users stand in brackets too, as in ``jit(my_jvp)``, but have none of their own.
_MARKS: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ('recomputed', re.compile(r'(?:^|/)rematted_computation(?:/|$)')),
    ('backward', re.compile(r'(?:^|[/(])transpose\(')),
    ('forward', re.compile(r'(?:^|[/(])jvp\(')),
)


def part_of(op_name: str) -> Part:
    """The part of a step that an operation belongs to.

    ``'forward'`` is what is differentiated, ``'backward'`` its transpose, and ``'recomputed'`` what
    ``jax.checkpoint`` computes again on the way back. ``'other'`` is the rest: the optimizer, or all of a
    program that takes no gradient. What a ``custom_vjp`` computes on the way back is backward.

    Args:
        op_name: the name of an operation, with the names of the scopes around it.

    Example:
        >>> [part_of(name) for name in ('jit(f)/dot', 'jit(f)/jvp()/dot', 'jit(f)/transpose(jvp())/dot')]
        ['other', 'forward', 'backward']
        >>> part_of('jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot')
        'recomputed'
    """
    return next((part for part, mark in _MARKS if mark.search(op_name)), 'other')


def inner_part(outside: Part, inside: Part) -> Part:
    """The part of an operation in a scope of one part, whose own name says another."""
    return max(outside, inside, key=PARTS.index)
