"""Exactness of counts: whether a number of executions, or a value computed from it, is exact or a bound."""

from __future__ import annotations

import enum


class Exactness(enum.Enum):
    """Whether a count is exact, a lower bound, an upper bound, or neither.

    AT_LEAST: inside a loop whose trip count depends on data, which counts as one iteration. AT_MOST: inside
    the largest of several branches, in a loop that may end early, or for sequences whose lengths are data.
    APPROXIMATE: both.
    """

    EXACT = 'exact'
    AT_LEAST = 'at least'
    AT_MOST = 'at most'
    APPROXIMATE = 'about'

    def combine(self, other: Exactness) -> Exactness:
        """Returns the exactness of the sum or product of two counts."""
        bounds = {self, other} - {Exactness.EXACT}
        if not bounds:
            return Exactness.EXACT
        return bounds.pop() if len(bounds) == 1 else Exactness.APPROXIMATE
