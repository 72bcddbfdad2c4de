"""Searches on the site find the recipe for the words that readers type."""

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.browser import Browser

# Typed words -> the address of the first result, a section or its page.
WANTED = {
    'OOM': r'(troubleshooting|cookbook)\.html#out-of-memory',
    'out of memory': r'(troubleshooting|cookbook|planning)\.html#out-of-memory',
    'gradient accumulation': r'cookbook\.html#gradient-accumulation',
    'all-gather': r'troubleshooting\.html#the-whole-batch-is-gathered',
    'FSDP2': r'coming_from\.html#pytorch',
    'KV cache': r'cookbook\.html#.*kv-cache',
    'LoRA': r'(lora\.html|cookbook\.html#lora)',
    'recompile': r'troubleshooting\.html#the-step-recompiles',
    'offload': r'cookbook\.html#.*in-host-memory',
    'XLA flags': r'xla_flags\.html',
    'H100': r'planning_gpu\.html#topologies',
    'sow': r'flax\.html#sow-and-capture',
    'sow MoE loss': r'flax\.html#sow-and-capture',
    'batch created inside the step': r'partitioning\.html#a-batch-created',
    'turn off partitioning': r'partitioning\.html',
    'fewer KV heads': r'cookbook\.html#a-kv-cache-with-fewer-heads',
    '1F1B': r'pipeline_parallelism\.html',
    'evaluation': r'cookbook\.html#evaluation',
    'safetensors': r'(cookbook|checkpoints)\.html#.*hugging-face',
    'DDP': r'training_loop\.html#setup-ddp-or-fsdp',
    'FSDP': r'cookbook\.html#fsdp-with-optax',
    'throughput': r'training_loop\.html#throughput-and-mfu',
    'MFU': r'training_loop\.html#throughput-and-mfu',
    'wandb': r'training_loop\.html#the-loop',
    'profiler': r'training_loop\.html#the-loop',
    'gradient clipping': r'(cookbook|training_loop)\.html#.*gradient-clipping',
    'bf16': r'(cookbook|training_loop)\.html#.*mixed-precision-bf16',
    'schedule': r'(cookbook|training_loop)\.html#.*schedule',
    'SLURM': r'multihost\.html#slurm',
    'NCCL': r'hangs\.html',
    'hang': r'hangs\.html',
    'NCCL operation timed out': r'hangs\.html',
    'hangs at exit': r'(hangs\.html|multihost\.html#the-end-of-a-program|troubleshooting\.html#it-hangs)',
    'does it fit': r'planning\.html#does-it-fit',
    'Will it fit': r'planning\.html#does-it-fit',
    'compiler crashes': r'planning_tpu\.html#when-the-compiler-crashes',
    'notebook dies': r'planning_tpu\.html#when-the-compiler-crashes',
    'device_put': r'reshard\.html#why-not-jaxdevice_put',
    'pipeline parallelism': r'pipeline_parallelism\.html',
    'GradScaler': r'training_loop\.html',
    'state_dict': r'training_loop\.html',
    'torchrun': r'training_loop\.html',
    'MeshShardingHelper': r'api/sharding_meshes\.html#scalax\.sharding\.MeshShardingHelper',
}

SHOWN = """
const first = document.querySelector('.md-search-result__item');
return first ? [...first.querySelectorAll('a.md-search-result__link')].map(link => link.href) : [];
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope='module')
def address(site: Path) -> Iterator[str]:
    """Serves the site over HTTP, because the search does not work for local files."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('typed', WANTED)
def test_the_recipe_is_found_first(typed: str, address: str, browser: Browser) -> None:
    browser.driver.get(f'{address}/index.html?q={quote(typed)}')
    links = browser.until(lambda: browser.run(SHOWN))
    assert isinstance(links, list)
    # A result is a page with its best section: compare the section, or the page if no section matches.
    best = [re.sub(r'\?h=[^#]*', '', link.removeprefix(f'{address}/')) for link in links[:2]]
    assert re.match(WANTED[typed], best[-1]) or re.match(WANTED[typed], best[0]), best
    assert browser.complaints() == []
