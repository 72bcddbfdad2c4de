"""Small programs in the form that XLA writes."""

HEAD = 'HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8\n\n'
ADD = '%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n' + (
    '  ROOT %sum = f32[] add(%x, %y)\n}\n\n'
)


def program(*lines):
    body = '\n'.join(f'  {line}' for line in lines)
    return f'{HEAD}{ADD}ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{body}\n}}\n'


MESH = {'fsdp': 4, 'tp': 2}
