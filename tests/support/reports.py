"""Reports for the tests of pages and of the browser."""

from scalax.explain import ReportRow, ShardingReport
from scalax.sharding import MeshShardingHelper, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
HOSTILE = [
    '<script>window.hacked = 1</script>',
    '</script><img src=x onerror="window.hacked = 1">',
    "\"><b onclick='window.hacked = 1'>&lt;",
    'two\nlines\t\0',
    'right \u202e left',
    'half of a pair \ud800',
    'é → 層',
]


def report():
    layers = [{'up': leaf(64, 256), 'norm': leaf(64)} for _ in range(12)]
    rules = TreePathShardingRule(
        ('up', P('fsdp', 'tp')), ('embed', P('tp')), ('norm', P()), ('head', P()), ('embed', P())
    )
    return HELPER.explain({'embed': leaf(512, 64), 'layers': layers, 'step': 0}, rules)


def hostile_report():
    rows = tuple(
        ReportRow(f'{name}/{name}', (8,), 'int8', P('x'), f'rule {name}', f'reason {name}', 8, 4)
        for name in HOSTILE
    )
    return ShardingReport(rows, {'x': 2, '<i>y</i>': 1}, ('</script>',), ('<b>',))


def synthetic_report(count):
    """Returns a report in which no two leaves fold or have the same shape."""
    rows = []
    for i in range(count):
        shape = (8 * (i + 1), 8 * (i * 7919 % 9973 + 1))
        size = 2 * shape[0] * shape[1]
        path = f'block_{i // 1000}/part_{i // 25 % 40:x}/leaf_{i:x}_kernel'
        reason = f'dimension 0 of size {shape[0]} is divisible by 8'
        rule = "FSDPShardingRule('fsdp')"
        rows.append(ReportRow(path, shape, 'bfloat16', P('fsdp'), rule, reason, size, size // 8))
    return ShardingReport(tuple(rows), {'fsdp': 8})
