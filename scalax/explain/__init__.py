"""Reports of one resolve: what each leaf got, which rule decided it, and what it costs.

`make_report` makes one; a report is a value that prints, compares, is saved and loaded, and shows itself in
notebooks.
"""

from scalax.explain._diff import LeafChange, ReportDiff
from scalax.explain._make import make_report
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReplicatedSummary, ReportRow

__all__ = ['LeafChange', 'ReplicatedSummary', 'ReportDiff', 'ReportRow', 'ShardingReport', 'make_report']
