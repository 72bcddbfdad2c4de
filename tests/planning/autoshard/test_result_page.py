"""docs/auto_sharding.md shows the current result of auto-sharding."""

import jax
import pytest

from examples.mixer import shapes, train_step
from scalax.plan import autoshard
from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason='which of two equal places is found differs there')
def test_the_page_shows_the_current_result():
    page = (ROOT / 'docs' / 'auto_sharding.md').read_text(encoding='utf-8')
    arguments = shapes(batch_size=64, layers=2, patches=16, channels=256)
    result = autoshard(
        train_step, arguments, batch_argnums=1, donate_argnums=0, sizes={'tp': 1}, memory=16 * 2**20
    )
    assert f'```text\n{result.to_code().strip()}\n```' in page
    rows = [f'{group.name} {group.spec} | next best: {group.next_spec}' for group in result.groups]
    assert '```text\n' + '\n'.join(rows) + '\n```' in page
