"""What did each leaf get, which rule said so, and what does it cost? Reports of one resolve."""

from scalax.explain._diff import LeafChange, ReportDiff
from scalax.explain._make import make_report
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReplicatedSummary, ReportRow

__all__ = ['LeafChange', 'ReplicatedSummary', 'ReportDiff', 'ReportRow', 'ShardingReport', 'make_report']
