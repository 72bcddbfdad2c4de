"""Self-contained pages of HTML: escaping, tables, widgets that a script brings to life, whole documents.

A widget is a plain table first, which is what readers see where scripts do not run, as in a notebook that is
not trusted. Its script replaces the table inside a shadow root, so that styles of ours and of the page around
it do not touch each other. Nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import html
import json
import zlib
from collections.abc import Container, Iterable, Sequence
from importlib import resources

MOST_LINES = 300
"""Rows in a plain table; the filter of the widget finds the others."""

_LEFT = ' style="text-align:left"'  # notebooks align the cells of tables to the right


def visible(text: str) -> str:
    r"""The text, with escapes for characters that cannot be printed or change the direction of writing.

    Example:
        >>> visible('a\nb \u202e é')
        'a\\nb \\u202e é'
    """
    if text.isprintable():
        return text
    return ''.join(
        char if char.isprintable() else char.encode('unicode_escape').decode('ascii') for char in text
    )


def escape(text: str) -> str:
    """The text as HTML, also for attributes.

    Example:
        >>> escape('</script> & "co"')
        '&lt;/script&gt; &amp; &quot;co&quot;'
    """
    return html.escape(visible(text))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Container[int] = ()) -> str:
    """A table of text without a style of its own.

    Args:
        heads: the heads of the columns.
        rows: the cells, as plain text.
        right: the columns to align to the right.
    """

    def line(start: str, end: str, texts: Sequence[str]) -> str:
        cells = (
            f'<{start}{"" if column in right else _LEFT}>{escape(text)}</{end}>'
            for column, text in enumerate(texts)
        )
        return f'<tr>{"".join(cells)}</tr>'

    body = '\n'.join(line('td', 'td', row) for row in rows)
    head = line('th scope="col"', 'th', heads)
    return f'<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>'


def paragraphs(lines: Iterable[str], style: str = '') -> str:
    """Lines of text, a paragraph each, perhaps with a style."""
    start = f'<p style="{style}">' if style else '<p>'
    return '\n'.join(f'{start}{escape(line)}</p>' for line in lines)


def still_page(title: str, body: str) -> str:
    """A whole document, which runs no script and loads nothing.

    Args:
        title: plain text.
        body: HTML, well-formed as XML is.
    """
    return _document(title, body)


def live_page(title: str, body: str, style: str, script: str) -> str:
    """A whole document, which runs its own script only and loads nothing.

    Args:
        title: plain text.
        body: HTML, well-formed as XML is; whole without the script.
        style: CSS.
        script: JavaScript, which runs below the body.
    """
    # As XML, scripts and styles are text, in which "<" and "&" would be markup.
    script = f'//<![CDATA[\n"use strict";\n{{\n{script}\n}}\n//]]>'
    return _document(title, f'{body}\n<script>{script}</script>', _allowed(script), style)


def _allowed(script: str) -> str:
    """The part of a security policy that lets a script run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"script-src 'sha256-{digest}'; "


def _document(title: str, body: str, scripts: str = '', style: str = '') -> str:
    """A whole document that loads nothing; *scripts* are those that may run, for its security policy."""
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {scripts}"
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,"/>\n'
        f'<style>\n{_shared("palette.css")}{_shared("page.css")}{style}</style>\n</head>\n'
        f'<body>\n{body}\n</body>\n</html>\n'
    )


@dataclasses.dataclass(frozen=True)
class Widget:
    """Part of a page that a script brings to life.

    Attributes:
        markup: the HTML inside the shadow root, before the script has run.
        style: the CSS of the shadow root.
        script: defines ``start(root, data)``, which is called with the shadow root and the data.
    """

    markup: str
    style: str
    script: str

    @functools.cached_property
    def _name_and_script(self) -> tuple[str, str]:
        inside = f'<style>\n{_shared("palette.css")}{self.style}</style>\n{self.markup}'
        # All of it is in the script: the sanitizer of an untrusted notebook drops scripts and their content,
        # but keeps the text of other elements.
        markup = json.dumps(inside).replace('<', r'\u003c')
        script = f'const MARKUP = {markup};\n{self.script}\n{_shared("widget.js")}'
        # The name tells versions apart: a saved notebook may hold widgets of an older scalax.
        name = hashlib.sha256(script.encode()).hexdigest()[:12]
        return name, f'(() => {{\n"use strict";\nconst WIDGET = "{name}";\n{script}}})();'

    def fragment(self, static: str, data: object) -> str:
        """HTML for a notebook cell or a `page`.

        Args:
            static: HTML for readers without scripts.
            data: the data that the script shows, ready for ``json.dumps``.
        """
        name, script = self._name_and_script
        return (
            # The second attribute keeps JupyterLab from taking keys typed inside for its own shortcuts.
            f'<div data-scalax="{name}" data-lm-suppress-shortcuts="true">\n'
            f'<div class="scalax-static">\n{static}\n</div>\n'
            f'<script type="text/plain">{_packed(data)}</script>\n'
            f'</div>\n<script>{script}</script>\n'
        )

    def page(self, title: str, static: str, data: object) -> str:
        """A whole document, which runs its own script only and loads nothing.

        Args:
            title: plain text.
            static: HTML for readers without scripts.
            data: the data that the script shows, ready for ``json.dumps``.
        """
        fragment = self.fragment(f'<h1>{escape(title)}</h1>\n{static}', data)
        return _document(title, fragment, _allowed(self._name_and_script[1]))


def _packed(data: object) -> str:
    """Data as short text without characters that are special in HTML."""
    text = json.dumps(data, separators=(',', ':'))
    return base64.b64encode(zlib.compress(text.encode())).decode()


@functools.cache
def asset(package: str, name: str) -> str:
    """The text of a file in the folder ``assets`` of a package."""
    return resources.files(package).joinpath('assets', name).read_text(encoding='utf-8')


def _shared(name: str) -> str:
    return asset('scalax._report', name)
