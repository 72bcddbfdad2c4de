"""The diagrams of the pages match scalax: scripts/docs_diagrams.py would draw them again."""

import pytest

from scripts.docs_diagrams import DARK, IMAGES, LIGHT, diagrams, svg


@pytest.mark.slow
def test_the_diagrams_match_the_reports() -> None:
    for name, (height, title, parts) in diagrams().items():
        for suffix, colors in (('', LIGHT), ('-dark', DARK)):
            picture = IMAGES / f'{name}{suffix}.svg'
            assert picture.read_text(encoding='utf-8') == svg(height, title, parts, colors), (
                f'{picture.name} is out of date: python -m scripts.docs_diagrams'
            )
