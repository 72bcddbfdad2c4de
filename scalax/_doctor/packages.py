"""The versions of packages, and those that JAX cannot use together."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator

from scalax._doctor.finding import Finding

NEEDED = ('scalax', 'jax', 'jaxlib', 'numpy', 'einops')
OPTIONAL = ('libtpu', 'rich', 'safetensors', 'orbax-checkpoint', 'flax', 'optax', 'equinox')
_PLUGIN = re.compile(r'jax[-_](cuda|rocm)\w*[-_](plugin|pjrt)')
_REQUIREMENT = re.compile(r'([\w.-]+)(?:\[[^]]*\])?([^;]*)')
_CLAUSE = re.compile(r'(==|<=|>=|<|>|!=|~=)\s*([\w.+]+)(\.\*)?')


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plugins() -> dict[str, str]:
    """The versions of JAX's plugins for GPUs."""
    names = {(each.metadata['Name'] or '').lower() for each in importlib.metadata.distributions()}
    return installed(sorted(name for name in names if _PLUGIN.fullmatch(name)))


def misfits(versions: dict[str, str], required: Iterable[str]) -> Iterator[Finding]:
    """Packages that JAX cannot use as they are.

    Args:
        versions: the installed packages.
        required: what JAX requires, as in its metadata: ``'libtpu==0.0.40.*; extra == "tpu"'``.

    Example:
        >>> [found] = misfits({'jax': '0.10.0', 'libtpu': '0.0.9'}, ['libtpu==0.0.40.*; extra == "tpu"'])
        >>> found.what
        'libtpu 0.0.9 does not fit JAX 0.10.0, which takes ==0.0.40.*'
    """
    always: dict[str, list[str]] = {}
    extras: dict[str, list[str]] = {}
    for text in required:
        parsed = _REQUIREMENT.match(text)
        if parsed is not None:
            kind = extras if 'extra ==' in text else always
            kind.setdefault(parsed[1].lower(), []).append(parsed[2].strip())
    # Extras, such as one for tests with old versions, say nothing of what JAX always needs.
    for name, clauses in {**extras, **always}.items():
        version = versions.get(name, '')
        if version and not any(_satisfies(version, each) for each in clauses):
            extra = 'tpu' if name == 'libtpu' else name.split('-')[1] if '-' in name else ''
            jax = f'jax[{extra}]' if extra else 'jax'
            yield Finding(
                f'{name} {version} does not fit JAX {versions["jax"]}, which takes {clauses[0]}',
                f'pip install "{jax}=={versions["jax"]}" brings the one that fits',
            )
    if len(kinds := {name.split('-')[1] for name in versions if _PLUGIN.fullmatch(name)}) > 1:
        one, *others = sorted(kinds)
        yield Finding(
            f'plugins for {one} and {", ".join(others)} are both installed: JAX may open either',
            f'pip uninstall those that do not fit the driver: jax-{one}-plugin jax-{one}-pjrt, or the others',
        )


def _satisfies(version: str, clauses: str) -> bool:
    """Whether a version is one that comma-separated clauses allow; True if one is not understood.

    Example:
        >>> _satisfies('0.0.40.1', '==0.0.40.*'), _satisfies('0.9', '<=0.12,>=0.10')
        (True, False)
    """
    own = _release(version)
    for clause in filter(None, clauses.split(',')):
        parsed = _CLAUSE.fullmatch(clause.strip())
        if parsed is None or not own:
            return True
        sign, other = parsed[1], _release(parsed[2])
        if parsed[3]:
            if (own[: len(other)] == other) is (sign == '!='):
                return False
            continue
        length = max(len(own), len(other))
        left, right = (each + (0,) * (length - len(each)) for each in (own, other))
        allowed = {
            '==': left == right,
            '<=': left <= right,
            '>=': left >= right,
            '<': left < right,
            '>': left > right,
            '!=': left != right,
            '~=': left >= right,
        }
        if not allowed[sign]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without those of a build or a development version."""
    found = re.match(r'\d+(?:\.\d+)*', version)
    return tuple(map(int, found[0].split('.'))) if found else ()
