"""Reports: the sharding of each leaf, the rule that decided it, and its bytes.

`make_report` creates a report. Reports can be printed, compared, saved, loaded, and displayed in notebooks.
"""

from scalax.explain._make_report import make_report
from scalax.explain._report import ShardingReport
from scalax.explain._rows import ReplicatedSummary, ReportRow

__all__ = ['ReplicatedSummary', 'ReportRow', 'ShardingReport', 'make_report']
