"""The versions of packages, and those that JAX cannot use together."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from scalax._doctor.finding import Finding

NEEDED = ('scalax', 'jax', 'jaxlib', 'numpy')
OPTIONAL = ('libtpu', 'safetensors', 'orbax-checkpoint', 'flax', 'optax', 'equinox')
_PLUGIN = re.compile(r'jax[-_](cuda|rocm)\w*[-_](plugin|pjrt)')


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
    always: dict[str, list[SpecifierSet]] = {}
    extras: dict[str, list[SpecifierSet]] = {}
    for each in map(Requirement, required):
        kind = extras if 'extra ==' in str(each.marker or '') else always
        kind.setdefault(each.name.lower(), []).append(each.specifier)
    # Extras, such as one for tests with old versions, say nothing of what JAX always needs. A nightly build
    # counts as its release.
    for name, clauses in {**extras, **always}.items():
        version = versions.get(name, '')
        if version and not any(each.contains(Version(version).base_version) for each in clauses):
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
