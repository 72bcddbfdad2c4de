"""Trains a LLaMA-style decoder on real text, with a sharding strategy chosen by a flag.

    python -m examples.llama.train
    python -m examples.llama.train --strategy fsdp --devices 4
    python -m examples.llama.train --strategy fsdp_tp --mesh fsdp=2,tp=4 --text book.txt
    python -m examples.llama.train --mesh search --batch_size 24
    python -m examples.llama.train --stages 2
    python -m examples.llama.train --checkpoints runs/saved

It writes a loss curve, a sample, the sharding of its state and figures to a folder. Ctrl-C ends it early,
with the same results for the completed steps. With `--checkpoints` it continues from the last checkpoint,
however it ended; SIGTERM saves and ends it.

The program also runs on several processes, which a launcher starts (`examples/launch/`). If a launcher
restarts it on fewer processes, it continues with the same batches. With a table of meshes, or `--mesh
search`, the new mesh fits the remaining devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import contextlib
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from absl import app, flags
from tqdm import tqdm

from examples.devices import choose_devices, quiet_logs
from examples.llama.data import Corpus, load_corpus
from examples.llama.interrupt import Interrupt
from examples.llama.mesh_choice import choose_mesh
from examples.llama.options import Options, read_options
from examples.llama.progress import Checkpoints, Progress
from examples.llama.report import Results, format_sample, write_report
from examples.llama.restart import Restart
from examples.llama.settings import check_settings, make_helper
from examples.llama.strategies import STRATEGIES, in_stages
from examples.llama.trainer import Trainer
from examples.llama.training import Params, TrainState
from scalax import distributed
from scalax.errors import ShardingError

REFUSED = 2
INTERRUPTED = 130  # the exit code of a shell for a program that Ctrl-C ended

flags.adopt_module_key_flags(sys.modules[read_options.__module__])  # show them in --help


def main(argv: Sequence[str]) -> int:
    """Runs the training with the options of the command line, and returns the exit code."""
    try:
        options = read_options(argv[1:])
        quiet_logs()
        distributed.initialize()
        restart = Restart()
        restart.done('start')
        trainer, corpus, output = prepare(options)
        saved = Checkpoints(options.checkpoints, trainer, options) if options.checkpoints else None
        restart.done('mesh')
    except app.UsageError as error:
        print(f'error: {error}', file=sys.stderr)
        return REFUSED
    with Interrupt(jax.process_count() > 1) as interrupt, exit_on_error():
        outcome = run(trainer, corpus, saved, options, interrupt, restart)
        if outcome is None:
            return distributed.PREEMPTED
        results, sample = outcome
        report = trainer.helper.explain(trainer.abstract_state(), trainer.strategy.state)
        if jax.process_index() == 0:
            write_report(output, results, sample, report.to_text(width=160))
    say(f'\n{report}\n\n{sample}\n{results.summary()}\n')
    say(f'The loss curve, the sample, this table and the numbers are in {output}/')
    return INTERRUPTED if results.interrupted else 0


def say(text: str) -> None:
    """Prints a text in process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Ends this process immediately after an error, if there are other processes.

    A normal exit would wait for the other processes, which wait for this one.
    """
    try:
        yield
    except Exception:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def prepare(options: Options) -> tuple[Trainer, Corpus, Path]:
    """Checks the options before any work, and returns the trainer, the text and the output folder."""
    strategy = STRATEGIES[options.strategy]
    if options.stages > 1:
        strategy = in_stages(strategy, options.stages, options.microbatches or 2 * options.stages)
    corpus = load_corpus(options.text, options.sequence_length)
    devices = choose_devices(options.devices)
    helper = make_helper(strategy, choose_mesh(options, strategy, devices), devices)
    check_settings(options, strategy, helper.mesh.shape)
    trainer = Trainer(helper, strategy, options.model, options.optimizer)
    try:
        helper.match_sharding_rule(strategy.state, trainer.abstract_state())
    except ShardingError as error:  # its message names every leaf, and the fix
        raise app.UsageError(str(error)) from error
    output = make_folder(options.output)

    say(f'text      {corpus}')
    say(f'devices   {describe(devices)}, {helper}')
    say(f'strategy  {strategy.name}, {strategy.doc}')
    return trainer, corpus, output


def run(
    trainer: Trainer,
    corpus: Corpus,
    saved: Checkpoints | None,
    options: Options,
    interrupt: Interrupt,
    restart: Restart,
) -> tuple[Results, str] | None:
    """Trains and evaluates, and returns the results and a sample of generated text.

    Returns None after SIGTERM, which leaves only the time to save.
    """
    start = time.monotonic()
    progress = saved.restore() if saved else None
    if progress is None:
        state = trainer.init(jax.random.key(options.seed))
        progress = Progress(state, evaluate(trainer, state.params, corpus, options), [])
    else:
        say(f'resumed   after step {progress.step}')
    restart.done('restore')
    parameters = sum(leaf.size for leaf in jax.tree.leaves(progress.state.params))
    say(f'model     {parameters:,} parameters, validation loss {progress.untrained:.3f} untrained')
    rate, is_preempted = train(trainer, progress, corpus, saved, options, interrupt, restart)
    if saved:
        saved.close()
    if is_preempted:
        say(f'Told to end: {"saved" if saved else "not saved (no --checkpoints)"} after step {progress.step}')
        return None
    state, losses = progress.state, [float(loss) for loss in progress.losses]
    validation = evaluate(trainer, state.params, corpus, options)
    sample = write_sample(trainer, state, corpus, options)
    results = Results(
        strategy=trainer.strategy.name,
        mesh=dict(trainer.helper.mesh.shape),
        devices=describe(trainer.helper.mesh.devices.flat),
        text=corpus.name,
        parameters=parameters,
        steps=len(losses),
        steps_asked=options.optimizer.steps,
        interrupted=interrupt.requested,
        train_losses=losses,
        validation_loss_untrained=progress.untrained,
        validation_loss=validation,
        tokens_per_second=rate,
        seconds=time.monotonic() - start,
    )
    return results, sample


def train(
    trainer: Trainer,
    progress: Progress,
    corpus: Corpus,
    saved: Checkpoints | None,
    options: Options,
    interrupt: Interrupt,
    restart: Restart,
) -> tuple[float, bool]:
    """Runs the remaining steps, and returns the tokens per second, and whether SIGTERM was received.

    It stops early if interrupted. The first step, which compiles, is not part of the speed.
    """
    first, last = progress.step, options.optimizer.steps
    size, sequence = options.batch_size, options.sequence_length
    examples = trainer.process_examples(size)
    load = (corpus.batch(size, sequence, options.seed, step, examples) for step in range(first, last))
    rate = 0.0
    with progress_bar(first, last) as bar, trainer.prefetch(load) as batches:
        while progress.step < last and not interrupt.requested:
            progress.state, loss = trainer.train_step(progress.state, next(batches))
            progress.losses.append(loss)
            is_preempted = distributed.should_stop(progress.step)
            if saved:
                saved.save(progress, now=is_preempted)
            if is_preempted:
                return rate, True
            # Reading a loss waits for its step. The previous loss is read, so that the devices always have a
            # step to run. If none were read, all steps would be queued at once; simulated devices share a few
            # threads, and a long queue leaves no thread to finish a collective.
            status = f'loss {float(progress.losses[max(first, progress.step - 2)]):.3f}'
            if progress.step == first + 1:
                start = time.monotonic()
                if (text := restart.report(progress.step)) and jax.process_index() == 0:
                    bar.write(text)  # print() would break the line of the bar
            else:
                rate = (progress.step - first - 1) * size * sequence / (time.monotonic() - start)
                status += f', {rate:,.0f} tokens/s'
            bar.set_postfix_str(status, refresh=False)
            bar.update()
            time.sleep(options.pause)
    if saved:
        saved.save(progress, now=True)
    return rate, False


def progress_bar(first: int, last: int) -> tqdm:
    """Returns a progress bar, which is visible in process 0, with fewer updates in log files."""
    interval = 0.1 if sys.stderr.isatty() else 2.0
    hidden = jax.process_index() != 0
    return tqdm(total=last, initial=first, desc='training', unit='step', mininterval=interval, disable=hidden)


def evaluate(trainer: Trainer, params: Params, corpus: Corpus, options: Options) -> float:
    """Returns the mean loss over the validation text, in nats per byte."""
    losses = []
    for batch, count in corpus.validation_batches(options.batch_size, options.sequence_length):
        losses.append(np.asarray(trainer.sequence_losses(params, trainer.to_devices(batch)))[:count])
    return float(np.concatenate(losses).mean())


def write_sample(trainer: Trainer, state: TrainState, corpus: Corpus, options: Options) -> str:
    """Returns a piece of validation text, and its continuation by the model."""
    # The smallest batch that can be sharded has one prompt for each batch shard.
    prompts = corpus.prompts(num_batch_shards(trainer), options.sequence_length)
    written = trainer.generate(state.params, trainer.to_devices(prompts), state.rng)
    return format_sample(prompts, np.asarray(written))


def num_batch_shards(trainer: Trainer) -> int:
    """Returns the number of shards of a batch."""
    mesh = trainer.helper.mesh
    return int(np.prod([mesh.shape[axis] for axis in trainer.strategy.data_axes]))


def describe(devices: Iterable[jax.Device]) -> str:
    """Returns the number and kind of the devices."""
    kinds = [device.device_kind for device in devices]
    return f'{len(kinds)} x {kinds[0]}'


def make_folder(path: str) -> Path:
    """Creates the output folder if needed, and returns it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise app.UsageError(f'--output {path}: cannot be made ({error.strerror}).') from error
    return Path(path)


if __name__ == '__main__':
    app.run(main)
