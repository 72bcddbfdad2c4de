"""Diagnosis of an installation and its devices: facts and faults."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

from scalax._core.render.html_pages import visible
from scalax._core.render.tables import terminal_width, wrap_lines
from scalax._diagnostics.doctor import environment
from scalax._diagnostics.doctor.devices import open_devices
from scalax._diagnostics.doctor.environment import Finding
from scalax.errors import plural

# All processes of a mesh need the same versions and variables, because they must compile the same programs.
_SAME_PACKAGES = ('scalax', 'jax', 'jaxlib', 'libtpu', 'numpy', 'einops')
_SAME_VARIABLES = (
    'XLA_FLAGS',
    'LIBTPU_INIT_ARGS',
    'JAX_ENABLE_X64',
    'JAX_DEFAULT_MATMUL_PRECISION',
    'JAX_PLATFORMS',
)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Facts about an installation, and its faults; ``str()`` of it is a page of text.

    Attributes:
        facts: name -> text.
        findings: the faults, each with its cure.
        process: the index of this process in the program.
    """

    facts: Mapping[str, str]
    findings: tuple[Finding, ...]
    process: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis in plain Python values, for ``json.dumps``."""
        findings = [finding._asdict() for finding in self.findings]
        return {'facts': dict(self.facts), 'findings': findings, 'process': self.process}

    def __str__(self) -> str:
        width = terminal_width(None)
        longest = max(map(len, self.facts))
        lines = [plural(len(self.findings), 'finding') if self.findings else 'nothing is wrong', '']
        lines += wrap_lines((f'{name:<{longest}}  {text}' for name, text in self.facts.items()), width)
        for number, (problem, cure) in enumerate(self.findings, 1):
            first, *more = problem.splitlines()
            lines += ['', *wrap_lines([f'{number}. {first}'], width), *more]
            lines += wrap_lines([f'   cure: {cure}'], width)
        return '\n'.join(map(visible, lines))


def diagnose(timeout: float = 120) -> Diagnosis:
    """Checks the installation, the environment variables and the devices of this machine.

    Another process opens the devices and runs a program on each; it is ended after the timeout. If the
    environment configures several processes, it joins the others.

    Args:
        timeout: the maximum seconds to open the devices.
    """
    versions = environment.installed()
    present = environment.accelerators()
    variables = environment.variables(os.environ)
    findings = [
        *environment.missing_plugins(present, versions),
        *environment.wrong_compilers(versions),
        *environment.wrong_variables(os.environ, jax.config.values, present),
    ]
    same_facts = {
        'Python': platform.python_version(),
        **{name: versions.get(name, 'not installed') for name in _SAME_PACKAGES},
        **{name: variables.get(name, 'not set') for name in _SAME_VARIABLES},
    }
    opened = open_devices(same_facts, timeout)
    values = opened.values
    only_cpu = values.get('devices', [['']])[0][0] == 'cpu'
    if present and only_cpu and not findings and not opened.findings:
        problem = f'this machine has {" and ".join(present)} devices, but JAX opens only the CPU'
        cure = 'run with JAX_PLATFORMS=tpu (or cuda, rocm): its error then gives the reason'
        findings.append(Finding(problem + opened.last_lines, cure))
    facts = {
        'versions': ', '.join(
            f'{name} {version}' for name, version in {'Python': same_facts['Python'], **versions}.items()
        ),
        'system': f'{platform.system()} {platform.machine()}, {os.cpu_count()} processors',
        'accelerators': ', '.join(f'{count} of {vendor}' for vendor, count in present.items()) or 'none',
        'variables': ' '.join(f'{name}={value}' for name, value in variables.items())
        or 'none that JAX reads',
        'processes': str(values.get('processes', 'unknown')),
        'devices': opened.summary or 'not opened',
    }
    return Diagnosis(facts, (*findings, *opened.findings), values.get('process', 0))
