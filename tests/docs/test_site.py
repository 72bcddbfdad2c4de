"""The site has no warnings, all public names, no network requests, no dead links, and no cut boxes."""

import html
import re
import zlib
from pathlib import Path
from urllib.parse import unquote

import pytest

from scripts.docs_site import breakable, in_parts, with_tables
from tests.support import ROOT
from tests.support.browser import Browser

API = (ROOT / 'tests' / 'api.txt').read_text(encoding='utf-8')
# Names that scalax.sharding has too, interfaces between rules, and helpers of messages.
ELSEWHERE = re.compile(r'scalax\.rules\.[A-Z]|.*\.(answers|parts|by_path|is_pure)$|scalax\.errors\.[a-z]')


def text_of(page: Path) -> str:
    return html.unescape(re.sub('<[^>]+>', '', page.read_text(encoding='utf-8')))


def names_of_api() -> list[tuple[str, str, str]]:
    """Returns (module, name, member or '') of tests/api.txt."""
    names, module, name = [], '', ''
    for line in API.splitlines():
        if match := re.match(r'(?:  (?=\w)|    \.)?([\w.]+)', line):
            depth = len(line) - len(line.lstrip())
            module, name = (match[1], '') if depth == 0 else (module, match[1] if depth == 2 else name)
            if depth:
                names.append((module, name, match[1] if depth == 4 else ''))
    return [entry for entry in names if not ELSEWHERE.match('.'.join(filter(None, entry)))]


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    inventory = zlib.decompress((site / 'objects.inv').read_bytes().split(b'\n', 4)[4]).decode()
    documented = {line.partition(' ')[0] for line in inventory.splitlines()}
    pages = {page: text_of(page) for page in (site / 'api').glob('*.html')}
    names = names_of_api()
    assert len(names) > 300
    missing = []
    for module, name, member in names:
        # Names of JAX and attributes have no separate entries: the text of the module's pages contains them.
        stem = PAGES.get(module, module.rpartition('.')[2])
        text = ''.join(pages[page] for page in pages if page.stem.partition('_')[0] == stem.partition('_')[0])
        if f'{module}.{name}.{member}'.strip('.') not in documented:
            match = re.search(rf'\b{member or name}\b', text)
            missing += [] if match else [f'{module}.{name}.{member}'.strip('.')]
    assert missing == []


# Modules whose page has another name.
PAGES = {'scalax': 'index', 'scalax.interop.nnx': 'interop', 'scalax.visualize': 'explain'}


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?="?(https?:)?//|url\(["\']?(?:https?:)?//'
    )
    sheets = re.compile(r'<link\b[^>]*rel="?(?:stylesheet|preconnect|icon)[^>]*href="?(?:https?:)?//')
    for page in [*site.rglob('*.html'), *site.rglob('*.css')]:
        text = page.read_text(encoding='utf-8')
        assert not loads.search(text) and not sheets.search(text), page
        assert 'data-md-component="source"' not in text, page  # a script there requests the stars from GitHub


@pytest.mark.medium
def test_links_between_pages_lead_somewhere(site: Path) -> None:
    # MkDocs checks links in Markdown, but not those of docstrings and of the hook.
    texts = {
        page: page.read_text(encoding='utf-8') for page in site.rglob('*.html') if page.name != '404.html'
    }
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    wrong = []
    for page, text in texts.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text):
            name, _, anchor = html.unescape(link).partition('#')
            target = (page.parent / name).resolve() if name else page
            if re.match(r'\w+:', link) or name in ('.', '..') or anchor.startswith('__'):
                continue
            if not target.exists() or (anchor and unquote(anchor) not in anchors.get(target, ())):
                wrong.append(f'{page.relative_to(site)}: {link}')
    assert len(texts) > 30 and wrong == []


def test_pictures_are_there(site: Path) -> None:
    pictures = [
        (page, html.unescape(source).partition('#')[0])
        for page in site.rglob('*.html')
        for source in re.findall(r'<img\b[^>]*\bsrc="([^"]+)"', page.read_text(encoding='utf-8'))
    ]
    assert len(pictures) > 10
    assert [picture for page, picture in pictures if not (page.parent / picture).exists()] == []


@pytest.mark.medium
@pytest.mark.parametrize('width', [1280, 400])
def test_boxes_wrap_or_scroll(site: Path, browser: Browser, width: int) -> None:
    for name in ('errors', 'planning', 'training_loop', 'api/sharding_functions'):
        browser.open(site / f'{name}.html', width)
        browser.until(lambda: browser.run(BOXES)[0] > 5)  # the page has its layout
        _, cut, covered = browser.run(BOXES)
        assert cut == [] and covered == 0 and browser.overflow() == 0, name


# The boxes of a page; the words of those that lose some at the right edge; how many have an icon above words.
BOXES = """
const boxes = [...document.querySelectorAll('.md-content pre > code')].filter((box) => box.offsetParent);
const parts = boxes.flatMap((box) => [box, ...box.querySelectorAll('.line, .columns')]);
const cut = parts.filter((part) => part.scrollWidth > part.clientWidth + 1
  && (part.matches('.output code, .line') || getComputedStyle(part).overflowX !== 'auto'));
const icons = boxes.filter((box) => {
  const icon = box.parentElement.querySelector('.md-code__nav')?.getBoundingClientRect();
  return icon && icon.left < box.getBoundingClientRect().right;
});
return [boxes.length, cut.map((part) => part.textContent), icons.length];
"""


def test_parts_of_printed_text() -> None:
    assert [*in_parts('words\nmore\n\na  b\npath\n1  2\nend\n')] == [
        '<span class="line">words\n</span>',
        '<span class="line">more\n</span>',
        '<span class="line">\n</span>',
        '<span class="columns">a  b\npath\n1  2\n</span>',
        '<span class="line">end\n</span>',
    ]


@pytest.mark.slow
def test_names_in_tables_break_at_their_parts(site: Path) -> None:
    assert (
        breakable('<code>plan.work_done &gt; 0.5</code>') == '<code>plan.<wbr>work_<wbr>done &gt; 0.5</code>'
    )
    page = (site / 'estimates.html').read_text(encoding='utf-8')
    assert '<code>flops_<wbr>per_<wbr>second</code>' in page
    index = (site / 'search' / 'search_index.json').read_text(encoding='utf-8')
    assert 'flops_per_second' in index


def test_links_to_files_of_the_repository_lead_somewhere(site: Path) -> None:
    linked = set()
    for page in site.rglob('*.html'):
        linked |= set(re.findall(r'/scalax/(?:blob|tree)/main/([^"#]+)', page.read_text(encoding='utf-8')))
    assert 'examples/frameworks' in linked
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_tables_of_docstrings() -> None:
    table = ['==  ====', 'a   b|c', '==  ====', '1   2', '    3', '==  ====', 'text']
    assert with_tables(table) == ['', '| a | b\\|c |', '|---|---|', '| 1 | 2 3 |', '', 'text']
