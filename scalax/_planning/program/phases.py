"""Phases of a training step (forward, backward, ...), from the names that JAX gives operations."""

from __future__ import annotations

import re
from typing import Literal, get_args

Phase = Literal['other', 'update', 'forward', 'backward', 'recomputed']
PHASES: tuple[Phase, ...] = get_args(Phase)
# JAX writes the transformations that made an operation into its name, in HLO programs and in jaxprs:
# jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot_general
# User-defined names are also in parentheses, as in ``jit(my_jvp)``, but contain none of their own.
_PATTERNS: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ('recomputed', re.compile(r'(?:^|/)rematted_computation(?:/|$)')),
    ('backward', re.compile(r'(?:^|[/(])transpose\(')),
    ('forward', re.compile(r'(?:^|[/(])jvp\(')),
)


def phase_of(op_name: str) -> Phase:
    """Returns the phase of an operation.

    ``'forward'`` is the differentiated computation, ``'backward'`` its transpose, and ``'recomputed'`` what
    ``jax.checkpoint`` computes again in the backward pass. ``'other'`` is the rest, which is everything in a
    program without a gradient. What a ``custom_vjp`` computes in the backward pass is ``'backward'``. The
    optimizer's update has no name of its own; `scalax._planning.program.phase_finder` recognizes it.

    Args:
        op_name: the name of an operation, with the names of the enclosing scopes.

    Example:
        >>> [phase_of(name) for name in ('jit(f)/dot', 'jit(f)/jvp()/dot', 'jit(f)/transpose(jvp())/dot')]
        ['other', 'forward', 'backward']
        >>> phase_of('jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot')
        'recomputed'
    """
    return next((phase for phase, pattern in _PATTERNS if pattern.search(op_name)), 'other')
