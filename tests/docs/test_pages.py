"""The pages are complete: links lead somewhere, pictures exist, caches are listed in docs/caches.md."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.docs_blocks import FILES

PAGES = [*FILES, ROOT / 'CHANGELOG.md']
FENCED = re.compile(r'^( *)(`{3,}|~{3,}).*?^ *\2[`~]* *$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|srcset|href)="([^"]+)"')
MOST_BYTES = 200_000


def text_of(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return FENCED.sub('', page.read_text(encoding='utf-8'))


def anchors(page: Path) -> set[str]:
    """Returns the anchors of its headings, as GitHub makes them."""
    headings = re.findall(r'^#+ (.+?) *$', text_of(page), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [first or second for first, second in LINK.findall(text_of(page))]
    for link in links:
        if link.startswith(('http://', 'https://')):
            continue
        name, _, anchor = link.partition('#')
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / 'page.md'
    page.write_text('# A *title*, twice\n```\n# [no](link)\n```\n[a](#a-title-twice)\n', encoding='utf-8')
    test_links_lead_somewhere(page)
    for link in ('#nowhere', 'nothing.md', 'page.md#nowhere'):
        page.write_text(f'# Title\n[a]({link})\n', encoding='utf-8')
        with pytest.raises(AssertionError, match=re.escape(link)):
            test_links_lead_somewhere(page)


def test_pictures_are_small_and_shown() -> None:
    pictures = sorted((ROOT / 'docs' / 'images').iterdir())
    shown = ''.join(map(text_of, PAGES))
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size <= MOST_BYTES, picture
        assert f'images/{picture.name}' in shown, picture


CACHES = re.compile(
    r'(?<!map\()functools\.(?:lru_)?cache\b|\bLRUCache\(\)|\b\w*LRUCache\[.*\]\(\)|\bKnown\(\)|weakref\.Weak\w+Dictionary\('
    r'|linecache\.cache\['
)
# Temporary: these caches end with the resolution of one tree, the counts of one program, or one trace.
PASSING = {'rules/_optimizer_state', '_planning/cost/flops', '_jaxpr/rebatch', '_spmd/step'}


def test_every_cache_is_documented() -> None:
    section = text_of(ROOT / 'docs' / 'caches.md')
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in section.splitlines() if '|' in line]
    named = {name for row in rows for name in re.findall(r'`([\w/]+)`', row[0])}
    files = {
        str(file.relative_to(ROOT / 'scalax').with_suffix(''))
        for file in (ROOT / 'scalax').rglob('*.py')
        if CACHES.search(file.read_text(encoding='utf-8'))
    }
    assert len(files) > 20
    assert files - named == PASSING
    tests = {name for row in rows[2:] for name in re.findall(r'`([\w/]+)`', row[-1])}
    assert tests and all((ROOT / 'tests' / f'{name}.py').exists() for name in tests)
