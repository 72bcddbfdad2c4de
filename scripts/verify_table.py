"""Verifies each step of the catalogue of faults, and writes what the reports say: docs/faults.md.

With --check it writes nothing, and fails where a fault is not found or the page has another list of them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import warnings
from pathlib import Path

os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from scalax.testing import Verified
from tests.verify.faults import FAULTS, SOUND, Fault

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / 'docs' / 'faults.md'
_KINDS = {'partitioner': 'XLA', 'user': 'user', 'pass': 'seeded in scalax'}
_HEAD = """\
# Faults that verify finds

Steps that compute something else on a mesh than on one device, without an error: what is wrong, whose fault
it is, the seed of the arguments that showed it first, and what the report of [`helper.verify`](verify.md)
says. Faults "seeded in scalax" are not in scalax: the tests put them there, to show that they would be
found. `make verify` runs all of them, and {sound} steps that are right although they look wrong, such as
routing by the largest of nearly equal numbers. This list is of JAX {jax}; earlier versions have more faults
of XLA.

| fault | whose | seed | what the report says |
|---|---|---|---|
"""


def verified(fault: Fault) -> Verified | str:
    """The report of a fault, or the error that it ends with."""
    helper = fault.helper()
    with fault.seeded():
        try:
            return helper.verify(fault.make)
        except RuntimeError as error:
            if not fault.raises or fault.raises not in str(error):
                raise
            return f'{type(error).__name__}: {error}'


def _row(name: str, fault: Fault, found: Verified | str) -> str:
    what = name.replace('_', ' ')
    linked = f'[{what}]({fault.source})' if fault.source.startswith('http') else what
    if isinstance(found, str):
        return f'| {linked} | {_KINDS[fault.kind]} | 0 | {_short(found)} |\n'
    first, said = found.differences[0], ''
    if found.first is not None:
        at = f' at {re.sub("^[^ ]* ", "", found.first.line)}' if found.first.line else ''
        inside = f' (in it: {", ".join(found.first.inside)})' if found.first.inside else ''
        said = f'; first {found.first.primitive}{at}{inside}'
    gone = [retry.change for retry in found.retries if retry.stays is False]
    said += f'; gone {", ".join(gone)}' if gone else ''
    return f'| {linked} | {_KINDS[fault.kind]} | {first.seed} | {_short(str(first) + said)} |\n'


def _short(text: str) -> str:
    return textwrap.shorten(text.replace('|', '/'), 230, placeholder=' ...')


def main() -> int:
    """Runs all, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', help='faults, or parts of their names; all by default')
    parser.add_argument('--check', action='store_true', help='write nothing')
    options = parser.parse_args()
    warnings.simplefilter('ignore')
    rows, missed = [], []
    for table in (FAULTS, SOUND):
        for name, fault in table.items():
            if not fault.shows or (options.names and not any(each in name for each in options.names)):
                continue
            found = verified(fault)
            is_found = isinstance(found, str) or bool(found.differences)
            print(f'{"found" if is_found else "equal"}  {name}', flush=True)
            if is_found != (table is FAULTS):
                missed.append(name)
            elif is_found:
                rows.append(_row(name, fault, found))
    if missed:
        print(f'{len(missed)} with another outcome than expected: {", ".join(missed)}')
    if options.names:
        print(''.join(rows))
    elif options.check:
        listed = {line.split('|')[1] for line in _PAGE.read_text().splitlines() if line.startswith('| ')}
        unlisted = {row.split('|')[1] for row in rows} - listed
        if unlisted:
            print(f'{_PAGE.name} does not have {", ".join(sorted(unlisted))}: run this without --check')
            missed.extend(unlisted)
    elif not missed:
        _PAGE.write_text(_HEAD.format(jax=jax.__version__, sound=len(SOUND)) + ''.join(rows))
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main())
