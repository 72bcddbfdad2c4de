"""Verifies each step of the catalogue of faults, and writes docs/verification_coverage.md from the reports.

With --check it writes nothing, and fails where a fault is not found or the page has another list of them.
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

The tests run [`helper.verify`](verify.md) on the {faults} faulty steps below. All but one (a donated
buffer, which raises an error) silently give wrong results on a mesh. `verify` finds all of them, and
reports nothing for {sound} correct steps that look suspicious.

If `verify` reports a step of yours, look for its first operation in the tables: they show whether XLA,
your code or scalax is the likely cause. The results are from JAX {jax}; with earlier versions, XLA has
more faults. To run all steps, run `make verify`.

- **Result**: the element with the largest error on the mesh, and in brackets its value on one device.
- **First operation**: the first operation whose result differs, and in brackets its function. For a
  `shard_map` with collectives, the brackets list these instead.
- **Gone without**: the difference disappears without this feature or mesh axis: partitioning along the
  batch, pipelining, or arguments sharded over the named axis.
"""
_SECTIONS = {
    'partitioner': '## Faults of XLA\n',
    'user': '## Mistakes in user code\n',
    'scalax': (
        '## Faults seeded in scalax\n\n'
        'scalax does not have these faults. The tests insert them, one at a time.\n'
    ),
}
_COLUMNS = """
| fault | result | first operation | gone without |
|---|---|---|---|
"""
# The names of the catalogue that are not clear without its code, in the words of the pages.
_NAMES = {
    'depthwise convolution laid out unlike its images': 'depthwise convolution with a sharded kernel',
    'gradient of a lookup in a reduced table': 'gradient of a lookup in a table with reduced axes',
    'gradient of the next token loss': 'gradient of a next-token loss',
    'counts of all but the last': 'counts of all elements but the last',
    'largest of each group but the first': 'maximum of each group but the first',
    'gradient of own rows': 'gradient without a psum',
    'mean over own rows summed up': 'sum of local means',
    'mean of means of unequal counts': 'mean of local means',
    'gradient of each row by what all devices have': 'gradient of each example by a replicated value',
    'norm counts what devices have in common': 'norm of sharded and replicated arrays',
    'position by another axis': 'positions from the wrong axis',
    'first device alone decays': 'weight decay on the first device only',
    'causal mask of own tokens': 'causal mask of local tokens',
    'softmax over own vocabulary': 'softmax over the local vocabulary',
    'gathered in another order': 'all-gather in another order',
    'batch statistics of own rows': 'batch statistics of local examples',
    'dropout keyed by device': 'dropout keys by device',
    'dropout alike on all devices': 'one dropout mask on all devices',
    'custom gradient forgets an axis': 'custom gradient that forgets an axis',
    'callback on own rows': 'callback on local examples',
    'custom partitioning by a wrong rule': '`custom_partitioning` with a wrong rule',
    'sharded op by a wrong rule': '`sharded_op` with a wrong rule',
    'sharded op sums twice': '`sharded_op` that sums twice',
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


def _title(name: str, fault: Fault) -> str:
    """Returns the name of a fault, and what goes wrong. Seeded faults are clear without their names."""
    sentence = (
        inspect.cleandoc(fault.make.__doc__ or '').split('\n\n')[0].replace('\n', ' ').removesuffix('.')
    )
    if fault.kind == 'scalax':
        return sentence
    words = name.replace('_', ' ')
    words = _NAMES.get(words, words)
    linked = f'[{words}]({fault.source})' if fault.source.startswith('http') else words
    return f'{linked}: {sentence[0].lower()}{sentence[1:]}'


def _row(name: str, fault: Fault, report: VerificationReport | str) -> str:
    linked = _title(name, fault)
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
        faults = sum(map(len, rows.values()))
        head = _HEAD.format(faults=faults, jax=jax.__version__, sound=len(SOUND))
        sections = [f'\n{_SECTIONS[kind]}{_COLUMNS}{"".join(some)}' for kind, some in rows.items()]
        _PAGE.write_text(head + ''.join(sections))
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main())
