"""What did each leaf get, which rule said so, and what does it cost? Reports of one resolve."""

from scalax.explain._report import ReplicatedSummary, ReportRow, ShardingReport, make_report

__all__ = ['ReplicatedSummary', 'ReportRow', 'ShardingReport', 'make_report']
