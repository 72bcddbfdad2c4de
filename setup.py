"""Packaging of scalax: all metadata lives here; pyproject.toml only configures tools."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Reads the version without importing scalax, because JAX need not be installed to build it."""
    text = (ROOT / 'scalax' / '_version.py').read_text(encoding='utf-8')
    found = re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("scalax/_version.py has no line of the form __version__ = '1.2.3'")
    return found.group(1)


def read_long_description() -> str:
    readme = ROOT / 'README.md'
    return readme.read_text(encoding='utf-8') if readme.exists() else ''


EXAMPLES = ['absl-py', 'grain', 'matplotlib', 'optax', 'orbax-checkpoint', 'scikit-learn', 'tqdm']
# libtpu is published for Linux only; elsewhere plans work without the TPU compiler. JAX knows which fits.
PLAN = ['jax[tpu]; sys_platform == "linux"']
# The compiler for NVIDIA GPUs of JAX's own version, without the libraries that programs need to run: it plans
# where no GPU is.
GPU_PLAN = ['jax[cuda12-local]; sys_platform == "linux"']
CHECKPOINT = ['orbax-checkpoint', 'safetensors']
# The Markdown of the pages is read by Material's extensions, and signatures are formatted by ruff.
DOCS = ['mkdocs-material>=9.6', 'mkdocs-redirects>=1.2', 'mkdocstrings[python]>=1', 'ruff']
EXTRAS = {
    'plan': PLAN,
    'gpu-plan': GPU_PLAN,
    'checkpoint': CHECKPOINT,
    'all': CHECKPOINT,  # without the compilers of `plan` and `gpu-plan`, which are for other machines
    'examples': EXAMPLES,
    'docs': DOCS,
    'dev': [
        *EXAMPLES,
        *DOCS,
        'build',
        'einops',
        # equimo and mamba2-jax: models of other projects that examples train. equimo 2 needs Python 3.12.
        'equimo>=2; python_version >= "3.12"',
        'equinox',
        'flatbuffers',
        # Libraries whose trees carry names of dimensions. haliax: the release runs on no JAX that we support.
        'flax>=0.12',
        'haliax==1.4.dev453',
        'hypothesis',
        'mamba2-jax',
        'mypy',
        'psutil',
        'pytest>=9',  # ends a run that is stuck in code that Python cannot interrupt
        'pytest-randomly',
        'pytest-timeout',
        'pytest-xdist',
        'safetensors',
        'selenium',
        # The wheel test builds without isolation, so the build backend is needed here too.
        'setuptools>=77',
        'twine',
        'wheel',
    ],
}

setup(
    # With finders, the default, type checkers do not see what `pip install -e` installs.
    options={'editable_wheel': {'mode': 'compat'}},
    name='scalax',
    version=read_version(),
    description='Runs JAX code written for one device, unchanged, on any mesh of devices.',
    long_description=read_long_description(),
    long_description_content_type='text/markdown',
    license_expression='Apache-2.0',
    license_files=['LICENSE'],
    python_requires='>=3.11',
    packages=find_packages(include=['scalax', 'scalax.*']),
    package_data={'scalax': ['py.typed', '_core/render/assets/*']},
    install_requires=['jax>=0.10', 'numpy'],
    extras_require=EXTRAS,
    entry_points={'console_scripts': ['scalax = scalax.__main__:run']},
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: MacOS',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Programming Language :: Python :: 3.14',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Typing :: Typed',
    ],
)
