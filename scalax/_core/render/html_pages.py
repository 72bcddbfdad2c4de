"""Self-contained HTML pages and notebook output.

Notebook output is plain HTML where scripts do not run, as in a notebook that is not trusted. Elsewhere its
script moves it into a shadow root, so that its styles and those of the surrounding page do not affect each
other. Nothing is loaded from the network.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib import resources


def visible(text: str) -> str:
    r"""Escapes characters that cannot be printed or change the direction of writing.

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
    """Escapes text for HTML, in attributes too.

    Example:
        >>> escape('</script> & "co"')
        '&lt;/script&gt; &amp; &quot;co&quot;'
    """
    return html.escape(visible(text))


def document(title: str, body: str, style: str, script: str) -> str:
    """Returns an HTML document that loads nothing and runs only its own script.

    Args:
        title: plain text.
        body: HTML that is also well-formed XML, and complete without the script.
        style: CSS.
        script: JavaScript, which runs after the body.
    """
    # In XML, "<" and "&" in scripts and styles would be markup.
    script = f'//<![CDATA[\n"use strict";\n{{\n{script}\n}}\n//]]>'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,"/>\n'
        f'<style>\n{asset("palette.css")}{asset("page.css")}{style}</style>\n</head>\n'
        f'<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n'
    )


def notebook_part(body: str, style: str, script: str) -> str:
    """Returns notebook output, which its script moves into a shadow root.

    Args:
        body: HTML.
        style: CSS of the shadow root.
        script: JavaScript that defines ``enhance(blocks)``, which is called with the element around the body.
    """
    # Styles are part of the script: the sanitizer of an untrusted notebook drops scripts and their content,
    # but keeps the text of style elements.
    inside = json.dumps(asset('palette.css') + style).replace('<', r'\u003c')
    script = f'const STYLE = {inside};\n{script}\n{asset("notebook.js")}'
    # The name distinguishes versions: a saved notebook may hold output of an older scalax.
    name = hashlib.sha256(script.encode()).hexdigest()[:12]
    script = f'(() => {{\n"use strict";\nconst PART = "{name}";\n{script}}})();'
    return (
        # The second attribute stops JupyterLab from treating keys typed inside as its own shortcuts.
        f'<div data-scalax="{name}" data-lm-suppress-shortcuts="true">\n'
        f'<div class="scalax-static">\n{body}\n</div>\n</div>\n<script>{script}</script>\n'
    )


@functools.cache
def asset(name: str) -> str:
    """Returns the text of a file in the folder ``assets``."""
    return resources.files('scalax._core.render').joinpath('assets', name).read_text(encoding='utf-8')
