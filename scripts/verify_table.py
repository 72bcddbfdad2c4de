"""Runs `helper.verify` on the catalogue of faults, and writes docs/verification_coverage.md from the reports.

With --check it writes nothing, and fails if `verify` misses a fault or if the page lists other faults.
"""

from __future__ import annotations

import argparse
import inspect
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

The tests run [`helper.verify`](verify.md) on the {faults} faulty steps below. On a mesh, all of them give
wrong results without an error, except a donated buffer, which raises one. `verify` finds all of them, and
reports no fault in {sound} correct steps that look wrong because of rounding errors.

If `verify` reports a step of yours, look up its first operation here: a similar row shows whether XLA, your
code or scalax is the likely cause. To run all steps, run `make verify`. The results are from JAX {jax};
earlier versions have more XLA faults.

- **Result**: the element with the largest error: its value on the mesh, and in brackets on one device.
- **First operation**: the first operation whose result differs, and in brackets the function that contains
  it. For a `shard_map` with collectives, the brackets list these instead. Empty if `verify` can't name an
  operation.
- **Gone without**: the feature or mesh axis without which the results agree: *partitioning* along the batch,
  *pipelining*, or arguments sharded over the axis. Empty if there is none.
"""
_SECTIONS = {
    'partitioner': '## Faults of XLA\n',
    'user': '## Mistakes in user code\n',
    'scalax': (
        '## Faults seeded in scalax\n\n'
        'scalax does not have these faults: the tests insert them, one at a time.\n'
    ),
}
_COLUMNS = """
| fault | result | first operation | gone without |
|---|---|---|---|
"""
# Words in names of the catalogue that prose spells differently.
_WORDS = {
    'custom partitioning': '`custom_partitioning`',
    'sharded op': '`sharded_op`',
    'psum': '`psum`',
    'next token': 'next-token',
    'all gather': 'all-gather',
}
_CHANGES = {
    'without pipelining': 'pipelining',
    'without partitioning along the batch': 'partitioning',
    'without pipelining and partitioning along the batch': 'pipelining and partitioning',
}


def verified(fault: Fault) -> VerificationReport | str:
    """Returns the report of a fault, or the text of the error that the step raises."""
    helper = fault.helper()
    with fault.seeded():
        try:
            return helper.verify(fault.make)
        except RuntimeError as error:
            if not fault.raises or fault.raises not in str(error):
                raise
            return f'{type(error).__name__}: {error}'


def _title(name: str, fault: Fault) -> str:
    """Returns the name of a fault and its effect. The docstring of a seeded fault begins with its name."""
    sentence = inspect.cleandoc(fault.make.__doc__ or '').split('\n\n')[0].replace('\n', ' ')
    if fault.kind == 'scalax':
        title, _, effect = sentence.removeprefix('A ').partition(': ')
    else:
        title, effect = name.replace('_', ' '), sentence
        for words, prose in _WORDS.items():
            title = re.sub(rf'\b{words}\b', prose, title)
    title = _capitalized(title)
    linked = f'[{title}]({fault.source})' if fault.source.startswith('http') else title
    return f'**{linked}.** {_capitalized(effect)}'


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _row(name: str, fault: Fault, report: VerificationReport | str) -> str:
    title = _title(name, fault)
    if isinstance(report, str):
        return f'| {title} | {_short(report)} | | |\n'
    result = re.sub(r'^(.*) is (.*), and (.*) on one device$', r'\1: \2 (\3)', str(report.differences[0]))
    first = ''
    if report.first_difference is not None:
        function = report.first_difference.line.partition(' ')[2]
        # Without line numbers, which change with every edit of the catalogue.
        inside = (
            ', '.join(
                operation.split(' at ')[0] for operation in report.first_difference.device_dependent_ops
            )
            or function
        )
        first = f'`{report.first_difference.primitive}{f" ({inside})" if inside else ""}`'
    gone = [ablation.change for ablation in report.ablations if ablation.still_differs is False]
    # Keep only minimal sets of changes.
    minimal = [
        change
        for change in gone
        if not any(change.startswith((f'{other}, ', f'{other} and ')) for other in gone)
    ]
    without = dict.fromkeys(_CHANGES.get(change, change.rpartition(' ')[2]) for change in minimal)
    return f'| {title} | {_short(result.replace(", ", ","))} | {_short(first)} | {", ".join(without)} |\n'


def _short(text: str) -> str:
    return textwrap.shorten(text.replace('|', '/'), 230, placeholder=' ...')


def main() -> int:
    """Runs all steps, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', help='faults, or substrings of their names; default: all')
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
        print(f'{len(missed)} unexpected outcomes: {", ".join(missed)}')
    if options.names:
        print(''.join(itertools.chain(*rows.values())))
    elif options.check:
        listed = {line.split('|')[1] for line in _PAGE.read_text().splitlines() if line.startswith('| ')}
        unlisted = {row.split('|')[1] for row in itertools.chain(*rows.values())} - listed
        if unlisted:
            print(f'{_PAGE.name} does not have {", ".join(sorted(unlisted))}: run this without --check')
            missed.extend(unlisted)
    elif not missed:
        faults = sum(map(len, rows.values()))
        head = _HEAD.format(faults=faults, jax=jax.__version__, sound=len(SOUND))
        sections = [f'\n{_SECTIONS[kind]}{_COLUMNS}{"".join(lines)}' for kind, lines in rows.items()]
        _PAGE.write_text(head + ''.join(sections))
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main())
