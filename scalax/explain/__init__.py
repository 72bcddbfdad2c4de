"""Reports: the sharding of each leaf, the rule that decided it, and its bytes.

`make_report` makes one. Reports print, compare, are saved and loaded, and show themselves in notebooks.
"""

from scalax.explain._make import make_report
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReplicatedSummary, ReportRow

__all__ = ['ReplicatedSummary', 'ReportRow', 'ShardingReport', 'make_report']
