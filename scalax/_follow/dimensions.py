"""Which dimensions of values may not be split: those of which something needs all places at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from scalax._jaxprs.dimensions import Dimensions, Numbers
from scalax._jaxprs.dims import ALONG
from scalax._jaxprs.user_shardings import placed_by_user

# The results of convolutions have windows, and those of ragged products groups.
_NOT_SPLIT = ALONG | {'conv_general_dilated', 'ragged_dot_general'}


class WholeDimensions(Dimensions):
    """The dimensions of values, and which classes of them are *whole*.

    Slices and sorts need whole dimensions; so do loops that run over them, primitives of which nothing is
    known, and users who place a value.

    Args:
        jaxpr, shards: as for `Dimensions`.

    Attributes:
        whole: the classes that are whole.
    """

    def __init__(self, jaxpr: Any, shards: int) -> None:
        self._whole: list[int] = []
        super().__init__(jaxpr, shards)
        self.whole = {*map(self.classes.root, self._whole)}

    def classes_of(self, atom: Any) -> list[int]:
        """The class of each dimension of a value, wherever its jaxpr is used."""
        return [*map(self.classes.root, self.of(atom) or self.new(atom))]

    def need(self, numbers: Iterable[int]) -> None:
        self._whole += numbers

    def equation(self, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        results = super().equation(equation, operands)
        for found, places in zip((operands, results), placed_by_user(equation), strict=True):
            self.need(itertools.chain(*[found[i] for i in places]))
        return results

    def primitive(self, name: str, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        results = super().primitive(name, equation, operands)
        if name in _NOT_SPLIT:
            self.need(itertools.chain(*operands, *results))
        return results
