"""MkDocs hooks for `mkdocs.yml`, which let the pages be read in the repository as well.

- The README, the changelog, the notes for contributors and the notebooks are pages of the site.
- A link to a file becomes a link to its page, or to the file in the repository if it has no page.
- Recipes come first in search results.
- The link to the repository makes no network requests.
- Printed text wraps, and its tables scroll. Names in tables break at dots and underscores.
- Pictures for light and dark mode follow the mode of the site.
- Docstrings: reStructuredText tables become Markdown tables, examples become code blocks, pages become links.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {'index.md': 'README.md', 'changelog.md': 'CHANGELOG.md', 'contributing.md': 'CONTRIBUTING.md'}
NOTEBOOKS = [*(ROOT / 'docs').glob('*.ipynb'), *(ROOT / 'docs' / 'notebooks').glob('*.ipynb')]

# A search for FSDP should find the recipe first, and then the API reference.
SEARCH_BOOSTS: dict[str, float] = {'cookbook.md': 4, 'training_loop.md': 2, 'troubleshooting.md': 2}
SEARCH_BOOSTS |= dict.fromkeys(('api/', 'changelog.md', 'design.md', 'glossary.md'), 0.5)

LINK = re.compile(r'\]\(([^)\s#]+)((?:#[^)\s]*)?)\)')
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)"([^>]*)>\s*</picture>'
)
CODE_IN_TABLE = re.compile(r'(?<=`)[^`\n]*\\\|[^`\n]*(?=`)')
TEXT = re.compile(r'^(<!-- prints -->\n)?```text$', re.MULTILINE)
OUTPUT = re.compile(r'(<div class="output[^>]*><pre><span></span><code>)(.*?)(</code>)', re.DOTALL)
COLUMNS = re.compile(r'\S {2,}\S|-{9,}|[─│┌]')
SHOWN = re.compile(r'<!-- shown (\d+) (\d+) -->')
CELL = re.compile(r'<t[dh]\b.*?</t[dh]>', re.DOTALL)
CODE = re.compile(r'<code\b.*?</code>', re.DOTALL)
NAME_PART = re.compile(r'(?<=\w)[._/(=]+(?=[^\W\d])(?![^<]*>)')
NAMED_PAGE = re.compile(r'\bdocs/(\w+)\.md')
RULE = re.compile(r' *=+(?: +=+)+')


def on_files(files: Any, config: Any) -> Any:
    for name, source in ROOT_PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for notebook in NOTEBOOKS:
        name = str(notebook.relative_to(ROOT / 'docs').with_suffix('.md'))
        files.append(File.generated(config, name, abs_src_path=str(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    pages = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
    source = Path(page.file.abs_src_path)
    if source in NOTEBOOKS:
        markdown = '\n\n'.join(cells_of(json.loads(markdown), source.name))
    for start, boost in SEARCH_BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta['search'] = {'boost': boost}

    def on_site(path: Path) -> str:
        return os.path.relpath(pages[path.resolve()], os.path.dirname(page.file.src_uri))

    def picture(match: re.Match[str]) -> str:
        dark, light = (on_site(source.parent / name) for name in match.groups()[:2])
        return f'<img src="{light}#only-light"{match[3]}><img src="{dark}#only-dark"{match[3]}>'

    def link(match: re.Match[str]) -> str:
        name, anchor = match.groups()
        path = (source.parent / name).resolve()
        if '://' in name or not path.exists():
            return match[0]
        if path in pages and name != source.name:  # the page of a notebook links to it
            name = on_site(path)
        else:
            kind = 'tree' if path.is_dir() else 'blob'
            name = f'{config.repo_url.rstrip("/")}/{kind}/main/{path.relative_to(ROOT)}'
        return f']({name}{anchor})'

    # GitHub needs `|` in code to be escaped inside tables; Python-Markdown does not.
    markdown = CODE_IN_TABLE.sub(lambda match: match[0].replace('\\|', '|'), markdown)
    markdown = PICTURE.sub(picture, markdown)
    text = '``` { .text .output .no-copy'
    markdown = TEXT.sub(lambda match: f'{text} .prints }}' if match[1] else f'{text} }}', markdown)
    return LINK.sub(link, markdown)


def cells_of(notebook: dict[str, Any], name: str) -> Iterator[str]:
    """Yields the cells of a notebook as Markdown, with a placeholder for each HTML output."""
    for number, cell in enumerate(notebook['cells']):
        words = ''.join(cell['source'])
        yield words if cell['cell_type'] == 'markdown' else f'```python\n{words}\n```'
        if not number:
            yield f'[This page as a notebook]({name})'
        for index, output in enumerate(cell.get('outputs', ())):
            data = output.get('data', {})
            text = ''.join(output.get('text') or data['text/plain']).rstrip('\n')
            yield (
                f'<!-- shown {number} {index} -->'
                if 'text/html' in data
                else f'<!-- prints -->\n```text\n{text}\n```'
            )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    if Path(page.file.abs_src_path) in NOTEBOOKS:
        cells = json.loads(Path(page.file.abs_src_path).read_text(encoding='utf-8'))['cells']

        def shown(match: re.Match[str]) -> str:
            output = cells[int(match[1])]['outputs'][int(match[2])]
            return f'<div class="shown">{"".join(output["data"]["text/html"])}</div>'

        html = SHOWN.sub(shown, html)
    return OUTPUT.sub(lambda match: f'{match[1]}{"".join(in_parts(match[2]))}{match[3]}', html)


def in_parts(text: str) -> Iterator[str]:
    """Yields lines that wrap, and blocks of tables and drawings, which scroll.

    >>> [*in_parts('words\\na  b\\nc\\nd  e\\n')]
    ['<span class="line">words\\n</span>', '<span class="columns">a  b\\nc\\nd  e\\n</span>']
    """
    for paragraph in re.split(r'(?<=\n)(?=\n)', text):
        lines = paragraph.splitlines(keepends=True)
        rows = [number for number, line in enumerate(lines) if COLUMNS.search(line)]
        first, end = (rows[0], rows[-1] + 1) if rows else (len(lines), len(lines))
        parts = [*lines[:first], ''.join(lines[first:end]), *lines[end:]]
        for number, part in enumerate(parts):
            if part:
                yield f'<span class="{"columns" if rows and number == first else "line"}">{part}</span>'


def on_post_page(output: str, **_: Any) -> str:
    """Keeps the link to the repository, without the script that asks GitHub for its stars."""
    output = output.replace(' data-md-component="source"', '')
    # Runs after the search index is built, because break points would split its words.
    return CELL.sub(lambda cell: CODE.sub(lambda code: breakable(code[0]), cell[0]), output)


def breakable(code: str) -> str:
    """Returns code with break points inside its names, for narrow tables.

    >>> breakable('<code>plan.model_flops &gt; 0.5</code>')
    '<code>plan.<wbr>model_<wbr>flops &gt; 0.5</code>'
    """
    return NAME_PART.sub(r'\g<0><wbr>', code)


def on_post_template(output_content: str, **_: Any) -> str:  # of the 404 page
    return on_post_page(output_content)


class Docstrings(griffe.Extension):
    """Docstrings in the form that the site shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace('Example:\n', 'Examples:\n')
            text = NAMED_PAGE.sub(r'[\1](../\1.md)', text).replace('::\n', ':\n')
            obj.docstring.value = '\n'.join(with_tables(text.split('\n')))


def with_tables(lines: list[str]) -> list[str]:
    """Returns the lines with reStructuredText tables (three rules of ``=``) as Markdown tables.

    >>> with_tables(['==  ==', 'a   b', '==  ==', '1   2', ' 0  3', '==  ==', 'text'])
    ['', '| a | b |', '|---|---|', '| 1 0 | 2 3 |', '', 'text']
    """
    rules = [number for number, line in enumerate(lines) if RULE.fullmatch(line)]
    if len(rules) < 3:
        return lines
    head, first, last = rules[:3]
    columns = [match.start() for match in re.finditer('=+', lines[head])]
    spans = [slice(*pair) for pair in zip(columns, [*columns[1:], None], strict=True)]
    rows: list[list[str]] = []
    for line in (*lines[head + 1 : first], *lines[first + 1 : last]):
        cells = [line[span].strip().replace('|', '\\|') for span in spans]
        if line[columns[0] : columns[0] + 1].strip() or not rows:
            rows.append(cells)
        else:  # continues the cells of the row above
            rows[-1] = [f'{before} {cell}'.strip() for before, cell in zip(rows[-1], cells, strict=True)]
    table = [f'| {" | ".join(row)} |' for row in rows]
    table.insert(1, '|---' * len(spans) + '|')
    indent = ' ' * columns[0]
    return [*lines[:head], '', *(indent + row for row in table), '', *with_tables(lines[last + 1 :])]
