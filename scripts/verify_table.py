"""Verifies each step of the catalogue of faults, and writes docs/verification_coverage.md from the reports.

With --check it writes nothing, and fails where a fault is not found or the page has another list of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import textwrap
import warnings
from pathlib import Path

os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from scalax.testing import VerificationReport
from tests.verification.faults import FAULTS, SOUND, Fault

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / 'docs' / 'verification_coverage.md'
_HEAD = """\
# Faults that verify finds

The faults that [`helper.verify`](verify.md) is tested with: steps that compute something else on a mesh
than on one device, without an error. `make verify` runs all of them, and {sound} steps that are right
although they look wrong. This list is of JAX {jax}; earlier versions have more faults of XLA.

- *Result*: the element with the largest error, its value on the mesh, and in brackets that on one device.
- *First*: the first operation that differs, and its function; of a `shard_map`, the collectives in it.
- *Gone without*: the change that removes the difference: no partitioning along the batch, no pipelining, or
  no argument sharded along a mesh axis.
"""
_SECTIONS = {
    'partitioner': '## Faults of XLA\n',
    'user': '## Faults of users\n',
    'scalax': '## Faults seeded in scalax\n\nscalax does not have these. The tests put them there.\n',
}
_COLUMNS = """
| fault | result | first | gone without |
|---|---|---|---|
"""
# The names of the catalogue, in the words of the pages.
_WORDS = {
    'each row': 'each example',
    'of rows': 'of examples',
    'own rows': 'own examples',
    'over rows': 'over examples',
    'rows put together': 'examples put together',
    'mended': 'corrected',
}
_CHANGES = {
    'without pipelining': 'pipelining',
    'without partitioning along the batch': 'partitioning',
    'without pipelining and partitioning along the batch': 'pipelining and partitioning',
}


def verified(fault: Fault) -> VerificationReport | str:
    """The report of a fault, or the error that it ends with."""
    helper = fault.helper()
    with fault.seeded():
        try:
            return helper.verify(fault.make)
        except RuntimeError as error:
            if not fault.raises or fault.raises not in str(error):
                raise
            return f'{type(error).__name__}: {error}'


def _row(name: str, fault: Fault, report: VerificationReport | str) -> str:
    what = name.replace('_', ' ')
    for word, better in _WORDS.items():
        what = what.replace(word, better)
    linked = f'[{what}]({fault.source})' if fault.source.startswith('http') else what
    if isinstance(report, str):
        return f'| {linked} | {_short(report)} | | |\n'
    result = re.sub(r'^(.*) is (.*), and (.*) on one device$', r'\1: \2 (\3)', str(report.differences[0]))
    first = ''
    if report.first_difference is not None:
        function = report.first_difference.line.partition(' ')[2]
        # Without their lines, which change with every edit of the catalogue.
        inside = (
            ', '.join(
                operation.split(' at ')[0] for operation in report.first_difference.device_dependent_ops
            )
            or function
        )
        first = f'`{report.first_difference.primitive}{f" ({inside})" if inside else ""}`'
    gone = [ablation.change for ablation in report.ablations if ablation.still_differs is False]
    # With one change less it is gone already.
    least = [
        change
        for change in gone
        if not any(change.startswith((f'{other}, ', f'{other} and ')) for other in gone)
    ]
    without = dict.fromkeys(_CHANGES.get(change, change.rpartition(' ')[2]) for change in least)
    return f'| {linked} | {_short(result.replace(", ", ","))} | {_short(first)} | {", ".join(without)} |\n'


def _short(text: str) -> str:
    return textwrap.shorten(text.replace('|', '/'), 230, placeholder=' ...')


def main() -> int:
    """Runs all, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', help='faults, or parts of their names; all by default')
    parser.add_argument('--check', action='store_true', help='write nothing')
    options = parser.parse_args()
    warnings.simplefilter('ignore')
    rows: dict[str, list[str]] = {kind: [] for kind in _SECTIONS}
    missed: list[str] = []
    for table in (FAULTS, SOUND):
        for name, fault in table.items():
            if not fault.shows or (options.names and not any(part in name for part in options.names)):
                continue
            report = verified(fault)
            is_found = isinstance(report, str) or bool(report.differences)
            print(f'{"found" if is_found else "equal"}  {name}', flush=True)
            if is_found != (table is FAULTS):
                missed.append(name)
            elif is_found:
                rows[fault.kind].append(_row(name, fault, report))
    if missed:
        print(f'{len(missed)} with another outcome than expected: {", ".join(missed)}')
    if options.names:
        print(''.join(itertools.chain(*rows.values())))
    elif options.check:
        listed = {line.split('|')[1] for line in _PAGE.read_text().splitlines() if line.startswith('| ')}
        unlisted = {row.split('|')[1] for row in itertools.chain(*rows.values())} - listed
        if unlisted:
            print(f'{_PAGE.name} does not have {", ".join(sorted(unlisted))}: run this without --check')
            missed.extend(unlisted)
    elif not missed:
        head = _HEAD.format(jax=jax.__version__, sound=len(SOUND))
        sections = [f'\n{_SECTIONS[kind]}{_COLUMNS}{"".join(some)}' for kind, some in rows.items()]
        _PAGE.write_text(head + ''.join(sections))
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main())
