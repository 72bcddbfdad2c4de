"""Self-contained pages of HTML, and parts of notebooks: escaping, whole documents, what a script wakes.

Part of a notebook is plain HTML first, which is what readers see where scripts do not run, as in a notebook
that is not trusted. Its script moves it into a shadow root, so that styles of ours and of the page around it
do not touch each other. Nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from importlib import resources


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


def document(title: str, body: str, style: str, script: str) -> str:
    """A whole document, which loads nothing and runs no script but its own.

    Args:
        title: plain text.
        body: HTML, well-formed as XML is; whole without the script.
        style: CSS.
        script: JavaScript, which runs below the body.
    """
    # As XML, scripts and styles are text, in which "<" and "&" would be markup.
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
    """Part of a notebook: as it is where scripts do not run, and else inside a shadow root.

    Args:
        body: HTML.
        style: CSS of the shadow root.
        script: JavaScript that defines ``enliven(blocks)``, which is called with the element that the body is
            in then.
    """
    # Styles are in the script: the sanitizer of an untrusted notebook drops scripts and their content, but
    # keeps the text of other elements.
    inside = json.dumps(asset('palette.css') + style).replace('<', r'\u003c')
    script = f'const STYLE = {inside};\n{script}\n{asset("notebook.js")}'
    # The name tells versions apart: a saved notebook may hold parts of an older scalax.
    name = hashlib.sha256(script.encode()).hexdigest()[:12]
    script = f'(() => {{\n"use strict";\nconst PART = "{name}";\n{script}}})();'
    return (
        # The second attribute keeps JupyterLab from taking keys typed inside for its own shortcuts.
        f'<div data-scalax="{name}" data-lm-suppress-shortcuts="true">\n'
        f'<div class="scalax-static">\n{body}\n</div>\n</div>\n<script>{script}</script>\n'
    )


@functools.cache
def asset(name: str) -> str:
    """The text of a file in the folder ``assets``."""
    return resources.files('scalax._core.render').joinpath('assets', name).read_text(encoding='utf-8')
