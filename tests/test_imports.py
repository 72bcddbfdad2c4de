"""Rules for imports: side effects of importing scalax, which file may import which, and private names."""

import ast
import graphlib
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / 'scalax'
FILES = sorted(PACKAGE.rglob('*.py'))
MAX_LINES = 400

# From the bottom up: modules only import from packages before theirs, wherever the import is.
DESIGN = (ROOT / 'docs' / 'design.md').read_text(encoding='utf-8')
SECTION = DESIGN.partition('## Packages')[2].partition('\n## ')[0]
ROOMS = re.findall(r'^\| `([\w.]+)` \|', SECTION, re.MULTILINE)[::-1]
GROUPS = {room.split('.')[0] for room in ROOMS if '.' in room} - set(ROOMS)

OPTIONAL = [
    *('absl', 'einops', 'equinox', 'flax', 'haliax', 'libtpu', 'matplotlib'),
    *('optax', 'orbax', 'rich', 'safetensors', 'sklearn', 'tqdm'),
]

# Underscored, yet public: the methods of named tuples, and functions that Python documents.
PUBLIC_UNDERSCORED = {'_asdict', '_current_frames', '_exit', '_fields', '_make', '_replace'}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def room_of(module: str) -> str:
    """'scalax.rules._fsdp' -> 'rules'; 'scalax._core.util.folding' -> '_core.util'."""
    _, *parts = module.split('.')
    sub_package = '.'.join(parts[:2])
    return sub_package if sub_package in ROOMS else parts[0] if parts else '__init__'


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding='utf-8'), str(path))


def package_of(path: Path) -> str:
    """Returns the package that a file's relative imports start from."""
    name = module_name(path)
    return name if path.name == '__init__.py' else name.rpartition('.')[0]


MODULES = {module_name(path): path for path in FILES}
TREES = {path: parse(path) for path in FILES}

each_file = pytest.mark.parametrize('path', FILES, ids=relative)


def imported_modules(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yields all imports of a file, including those inside functions, with lines and full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                parents = package.split('.')
                parents = parents[: len(parents) - node.level + 1]
                base = '.'.join([*parents, base] if base else parents)
            for alias in node.names:
                # `from scalax import errors` imports a module, `from scalax.errors import X` not.
                full = f'{base}.{alias.name}'
                a_name = base.startswith('scalax') and full not in MODULES
                yield node.lineno, base if a_name else full


# --- Side effects of the import -------------------------------------------------------------------


def run_fresh(code: str) -> str:
    """Runs code in a new interpreter without imports."""
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    env.pop('JAX_NUM_CPU_DEVICES', None)
    env.pop('XLA_FLAGS', None)
    command = [sys.executable, '-W', 'error', '-c', code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = 'import scalax, scalax.checkpoint, scalax.sharding, scalax.utils'


@pytest.mark.medium
def test_import_touches_no_device() -> None:
    # JAX only accepts the number of devices until a backend is in use.
    code = f"""
import jax
{IMPORT}
jax.config.update('jax_num_cpu_devices', 3)
print(len(jax.devices()))
"""
    assert run_fresh(code).strip() == '3'


@pytest.mark.medium
def test_import_changes_no_global_state() -> None:
    # JAX itself may set variables when it is imported, so it comes first.
    code = f"""
import os
import jax, jax.numpy, numpy
before = dict(os.environ), dict(jax.config.values)
{IMPORT}
assert dict(os.environ) == before[0], 'os.environ was edited'
assert dict(jax.config.values) == before[1], 'the configuration of JAX was edited'
print(jax.sharding.get_abstract_mesh().empty)
"""
    assert run_fresh(code).strip() == 'True'


@pytest.mark.medium
def test_import_does_without_the_optional_dependencies() -> None:
    code = f"""
import sys
{IMPORT}
print(*sorted(set({OPTIONAL}) & set(sys.modules)))
"""
    assert run_fresh(code).strip() == ''


@pytest.mark.medium
def test_reports_plans_and_searches_are_imported_lazily() -> None:
    code = """
import sys
import scalax.sharding
late = {'_planning', '_planning.autoshard', '_core.render', '_planning.mesh_search', 'checkpoint'}
late |= {'cli', 'custom_op', 'explain', 'plan'}
late |= {'_data.reshard', '_verification', 'visualize'}
print(*sorted(name for name in late if f'scalax.{name}' in sys.modules))
from scalax.sharding import ShardingReport
print(ShardingReport.__module__)
"""
    assert run_fresh(code).splitlines() == ['', 'scalax.explain._report']


# --- Which file imports which --------------------------------------------------------------------


def upward_imports(tree: ast.Module, module: str, package: str) -> Iterator[str]:
    room = room_of(module)
    for line, name in imported_modules(tree, package):
        other = room_of(name)
        if (
            name.split('.')[0] == 'scalax'
            and other not in {room, *GROUPS}
            and ROOMS.index(other) > ROOMS.index(room)
        ):
            yield f'{module}, line {line}: {room} imports {name}, which is not below it'


@pytest.mark.medium
def test_rooms_import_those_below() -> None:
    assert sorted({room_of(module) for module in MODULES} - GROUPS) == sorted(ROOMS)
    wrong = [
        text for path in FILES for text in upward_imports(TREES[path], module_name(path), package_of(path))
    ]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize(
    'statement',
    [
        'import scalax',
        'import scalax.sharding',
        'from scalax import sharding',
        'from scalax.sharding import Mesh',
        'from .. import sharding',
        'from ..sharding import Mesh',
        'def f():\n    from scalax.sharding import Mesh',
        'if TYPE_CHECKING:\n    from scalax.sharding import Mesh',
    ],
)
def test_an_import_that_points_up_is_found(statement: str) -> None:
    assert list(upward_imports(ast.parse(statement), 'scalax.rules._fsdp', 'scalax.rules'))


@pytest.mark.parametrize('statement', ['from . import _base', 'from ..errors import E', 'import jax'])
def test_an_import_that_does_not_point_up_is_fine(statement: str) -> None:
    assert not list(upward_imports(ast.parse(statement), 'scalax.rules._fsdp', 'scalax.rules'))


def imports_of_files() -> dict[str, set[str]]:
    """Returns the imports of each file, including those for type hints."""
    return {
        module: {name for _, name in imported_modules(TREES[path], package_of(path)) if name in MODULES}
        - {module}
        for module, path in MODULES.items()
        if path.name != '__init__.py'  # packages only re-export names of their modules
    }


@pytest.mark.medium
def test_no_file_imports_itself_by_way_of_others() -> None:
    assert list(graphlib.TopologicalSorter(imports_of_files()).static_order())


# --- Private names of other libraries -------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith('_') and not name.endswith('__')


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a file defines: functions, classes, variables, attributes, modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or ''


OURS = {name for tree in TREES.values() for name in defined_names(tree)}
OURS |= {part for module in MODULES for part in module.split('.')}


def private_uses(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yields uses of private names, as imports or attributes, that scalax does not define.

    The type of an object is not visible in the source, but a private attribute that scalax never defines must
    belong to another library.
    """
    for line, name in imported_modules(tree, package):
        if any(is_private(part) for part in name.split('.')) and name.split('.')[0] != 'scalax':
            yield line, name
    for node in ast.walk(tree):
        name = ''
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ('getattr', 'hasattr', 'setattr', 'delattr')
            and isinstance(node.args[1], ast.Constant)
        ):
            name = str(node.args[1].value)
        if is_private(name) and name not in OURS | PUBLIC_UNDERSCORED:
            yield node.lineno, name


@pytest.mark.medium
@each_file
def test_uses_public_names_only(path: Path) -> None:
    uses = private_uses(TREES[path], package_of(path))
    wrong = [f'{relative(path)}:{line}: {name} is private' for line, name in uses]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize(
    'statement',
    [
        'import jax._src.core',
        'from jax._src import core',
        'from jax import _src',
        'from numpy import _core',
        'mesh._flat_devices_tuple',
        'jax.jit(f)._cache_size()',
        "getattr(mesh, '_hash')",
    ],
)
def test_a_private_name_is_found(statement: str) -> None:
    assert list(private_uses(ast.parse(statement), 'scalax'))


# --- Sizes of files -------------------------------------------------------------------------------


def lines_of_code(source: str) -> int:
    """Returns the lines of code, without blank lines, comments and docstrings."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code and token.type != tokenize.ENDMARKER:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            # A statement that is one string is documentation.
            if [part.type for part in statement] != [tokenize.STRING]:
                for part in statement:
                    lines.update(range(part.start[0], part.end[0] + 1))
            statement = []
    return len(lines)


def test_lines_of_code_are_counted() -> None:
    source = '''"""A module.

More of it.
"""

# A comment.
VALUE = (
    1,  # one

    # Of the next line.
    """a string
    of two lines""",
)


def function():
    """What it does."""
    return VALUE
'''
    assert lines_of_code(source) == 7


@pytest.mark.medium
@each_file
def test_file_is_short(path: Path) -> None:
    lines = lines_of_code(path.read_text(encoding='utf-8'))
    assert lines <= MAX_LINES, f'{lines} lines of code; one idea a file, {MAX_LINES} lines at most'


@pytest.mark.medium
@each_file
def test_xla_flags_are_left_alone(path: Path) -> None:
    text = path.read_text(encoding='utf-8')
    if room_of(module_name(path)).startswith(('_diagnostics.doctor', '_planning')):  # which read them
        assert not re.search(r'environ(\.setdefault|\.update|\[[^]]*\] *=[^=])|putenv\(', text)
    else:
        assert 'XLA_FLAGS' not in text
