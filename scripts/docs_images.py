"""Takes the screenshots of docs/images in a browser: reports, plans, a search.

Usage, in the development environment: ``python scripts/docs_images.py``. It runs the Python blocks of
docs/reports.md in a scratch folder, and takes screenshots of the report that they write, light and dark. If
the compilers for TPUs and GPUs are installed, it also takes screenshots of plans, a search, and an
auto-sharding result. It needs Chromium. No test compares the pictures, since they depend on its version and
on fonts.
"""

import contextlib
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / 'docs' / 'images'
PAGE = ROOT / 'docs' / 'reports.md'

CHROMIUM_NAMES = ('chromium', 'chromium-browser', 'google-chrome')
PLAN = (
    *(sys.executable, '-m', 'scalax', 'plan', 'examples/plan_llama.py:make_8b', '--quick'),
    *('--topology', 'v5p:4x4x4', '--mesh', 'fsdp=-1,tp=4'),
)
IN_STAGES = (
    *(sys.executable, '-m', 'scalax', 'plan', 'examples/plan_llama.py:make_8b', '--quick'),
    *('--topology', 'v5p:4x4x4', '--mesh', 'stage=4,fsdp=4,tp=4'),
)
ON_GPUS = (
    *(sys.executable, '-m', 'scalax', 'plan', 'examples/plan_llama.py:make_70b'),
    *('--topology', 'h100:64x8', '--mesh', 'fsdp=-1,tp=8'),
)
FOUND = (
    *(sys.executable, '-m', 'scalax', 'autoshard', 'examples/mixer.py:make_step', '--topology', 'v5e:2x4'),
    *('--batch', '1', '--donate', '0', '--memory', '8GiB'),
)
SEARCH = (
    *(sys.executable, '-m', 'scalax', 'search', 'examples/plan_llama.py:make_8b', '--topology', 'v5p:4x4x4'),
    *('--axes', 'data,fsdp,tp', '--sizes', 'data=1,2,4', '--sizes', 'tp=1,2,4,8'),
)
# name of the picture -> the code that writes the page, and the part of it to show
PAGES = {
    'plan-llama-8b': (PLAN, 1480),
    'plan-llama-8b-stages': (IN_STAGES, 1000),
    'plan-llama-70b-h100': (ON_GPUS, 1480),
    'autoshard-mixer': (FOUND, 1100),
    'search-llama-8b': (SEARCH, 1060),
}
SIZE = (1280, 710)
SCALE = 1.5  # sharp on high-density screens
COLORS = 256
MOST_BYTES = 200_000
SECONDS = 120


def main() -> int:
    chromium = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if chromium is None:
        print(f'none of {", ".join(CHROMIUM_NAMES)} is installed', file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run_blocks(scratch)
        for dark in (False, True):
            picture = IMAGES / f'llama-405b{"-dark" if dark else ""}.png'
            photograph(chromium, scratch / 'llama-405b.html', picture, scratch, dark)
        if importlib.util.find_spec('libtpu'):
            for name, (command, height) in PAGES.items():
                page = scratch / f'{name}.html'
                subprocess.run([*command, '--html', page], cwd=ROOT, check=True, timeout=SECONDS)
                for dark in (False, True):
                    picture = IMAGES / f'{name}{"-dark" if dark else ""}.png'
                    photograph(chromium, page, picture, scratch, dark, height)
    for picture in sorted(IMAGES.iterdir()):
        print(f'{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes')
        if picture.stat().st_size > MOST_BYTES:
            print(f'that is more than {MOST_BYTES:,}', file=sys.stderr)
            return 1
    return 0


def run_blocks(folder: Path) -> None:
    """Runs the page's blocks in a folder, to which they write their files."""
    names: dict[str, object] = {}
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(
            r'^```python\n(.*?)^```', PAGE.read_text(encoding='utf-8'), re.DOTALL | re.MULTILINE
        ):
            exec(compile(block, str(PAGE), 'exec', dont_inherit=True), names)


def photograph(
    chromium: str, page: Path, picture: Path, scratch: Path, dark: bool, height: int = SIZE[1]
) -> None:
    shot = scratch / 'shot.png'
    command = [
        chromium,
        *('--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars'),
        *('--disable-background-networking', '--no-first-run'),
        f'--user-data-dir={scratch / f"profile-{dark}"}',
        f'--blink-settings=preferredColorScheme={0 if dark else 1}',
        f'--window-size={SIZE[0]},{height}',
        f'--force-device-scale-factor={SCALE}',
        f'--screenshot={shot}',
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    with Image.open(shot) as image:
        few = image.convert('RGB').quantize(COLORS, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


if __name__ == '__main__':
    raise SystemExit(main())
