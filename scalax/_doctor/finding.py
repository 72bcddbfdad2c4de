"""A finding: what is wrong, and its cure."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
        what: what was found.
        cure: what to do about it.
    """

    what: str
    cure: str
