"""The job that fetches a state from another one, into shardings of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from scalax._core.channel.secret import resolve_secret
from scalax._core.mesh import meshes
from scalax._data.host import agreement, process_collectives
from scalax._data.reshard.block_schedule import Index, Piece, extent
from scalax._data.reshard.device_steps import Blocks, is_here
from scalax._data.reshard.leaf_mapping import NameMapping, put
from scalax._data.reshard.request import Job, Options
from scalax._data.reshard.routes import Route
from scalax._data.reshard.run import moved, start_in
from scalax._jax import transfer
from scalax.errors import TransferError
from scalax.jobs._lines import Line, checked_seconds

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules import RuleLike

_GRACE = 5.0  # seconds after which the sender should have said that there is nothing to receive
_OFTEN = 1.0  # seconds between two signs of life
_ADVICE = 'What to do: call receive with the same arguments on every process of the job.'


def receive(
    helper: MeshShardingHelper,
    address: str,
    rules: RuleLike,
    *,
    mapping: NameMapping = None,
    dtype: Any = None,
    memory: int | str | None = None,
    wait: float = 600.0,
    timeout: float = 60.0,
    secret: str | None = None,
) -> Any:
    """Receives the tree that a `Sender` of another job sends next. Every process has to call it.

    Each device gets the parts that it needs, each once, from a device of the sender that has them.

    Args:
        helper: the mesh.
        address: of the sender, ``'host:port'``.
        rules: as for `MeshShardingHelper.shard`, for the tree that results.
        mapping: the names of leaves in the result, as in `MeshShardingHelper.reshard`.
        dtype: what floating-point leaves are cast to; as in `MeshShardingHelper.reshard`.
        memory: a bound on what is alive on each device beside the result; as there.
        wait: seconds to wait for the sender to listen, and then to send.
        timeout: seconds to wait for each answer, and for each part.
        secret: that of the `Sender`. Default: the environment variable ``SCALAX_RUN_TOKEN``.

    Returns:
        Nested dicts of jax.Arrays; their leaf paths are those of the sender's tree, if there is no mapping.

    Raises:
        ArgumentError: an argument is invalid, or the mapping does not fit the tree; or the address is that of
            another machine, and there is no secret.
        ShardingError: the rules do not fit the tree.
        TransferError: the sender is not there, gone or silent, or has another secret; or another process of
            this job has failed. Nothing is returned on any process.

    Example:
        >>> import threading
        >>> import jax.numpy as jnp
        >>> from scalax.jobs import Sender, receive
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([8], ['fsdp'])
        >>> weights = helper.shard({'w': jnp.arange(8.0)}, PartitionSpec('fsdp'))
        >>> with Sender('localhost:0') as sender:  # in another job, usually
        ...     sending = threading.Thread(target=sender.send, args=[weights])
        ...     sending.start()
        ...     got = receive(helper, sender.address, PartitionSpec(), dtype='bfloat16')
        ...     sending.join()
        >>> got['w'].dtype.name, got['w'].sharding.spec
        ('bfloat16', P())
    """
    mesh = helper.mesh
    meshes.require_devices(mesh, 'receive')
    processes = process_collectives.processes_of(mesh)
    name = secrets.token_hex(8)
    if processes.several:
        name = process_collectives.broadcast_bytes(mesh, 0, name.encode()).decode()
    question = {'asks': 'join', 'job': name, 'seconds': wait}
    question |= {'receiver': processes.here, 'receivers': len(processes.indices)}
    with contextlib.ExitStack() as connections:
        texts: list[tuple[str, str]] = []
        error: Exception | None = None
        try:
            checked_seconds('receive', wait, timeout)
            options = Options.of(mapping, dtype, False, memory)
            token = resolve_secret('receive', secret)
            senders = _Senders(connections, address, token, question, wait, timeout)
            job = Job.of(helper, senders.tree, rules, options)
            texts = [*job.texts(), ('(the number of the tree)', str(senders.number))]
            tree = moved(job, senders.carry)
        except Exception as fault:  # noqa: BLE001 - raised once all processes know
            error = fault
        agreement.agree(mesh, 'receive', f'{address=}', texts, _ADVICE, error, kind=TransferError)
        senders.done()
    return tree


class _Senders:
    """The processes of the sender.

    Attributes:
        number: of the tree that they send.
        tree: its leaves as structs, in nested dicts.
    """

    def __init__(
        self,
        connections: contextlib.ExitStack,
        address: str,
        secret: bytes,
        question: Mapping[str, Any],
        wait: float,
        timeout: float,
    ) -> None:
        self._timeout, self._told = timeout, time.monotonic()
        self._lines: list[Line] = []
        self._transfers: list[Any] = []
        addresses = [address]
        while len(self._lines) < len(addresses):
            process = len(self._lines)
            line = Line(f'process {process} of the sender', addresses[process], secret, wait, timeout)
            connections.callback(line.close)
            answer = line.ask(question, wait + _GRACE)
            if not process:
                first, server = answer, transfer.server(line.own_address)
                question = {**question, 'number': first['number']}
                addresses += answer['others']
            if answer['number'] != first['number']:
                raise line.fault('sends another tree than process 0: all processes have to call send')
            self._lines.append(line)
            self._transfers.append(server.connect(answer['transfer']))
        self.number = first['number']
        self.tree: dict[str, Any] = {}
        blocks = [_Elsewhere.of(one) for one in first['blocks']]
        for number, (path, shape, dtype, impl, block, weak) in enumerate(first['leaves']):
            kind = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype if impl else dtype
            put(self.tree, path, _Sent(shape, kind, weak, blocks[block], number))
        # The sender's tree may have another order: nested dicts are flattened by their keys.
        self._numbers = [leaf.number for leaf in jax.tree.leaves(self.tree)]

    def carry(
        self, leaf: int, route: Route, pieces: Sequence[Piece], _: Blocks, shape: tuple[int, ...]
    ) -> Blocks:
        """Pieces of an array, by the device of this process that needs each; as `run.Carry`."""
        asked: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            if is_here(piece.target):
                asked[piece.source.process].append(piece)
        came: Blocks = {}
        for process, ours in asked.items():
            sizes = route.in_source(extent(ours[0].box))
            blocks = route.schedule.source
            parts = [
                [piece.source.id, route.in_source(start_in(piece, blocks[piece.source]))] for piece in ours
            ]
            wanted = {
                'asks': 'parts',
                'leaf': self._numbers[leaf],
                'parts': parts,
                'sizes': sizes,
                'dtype': str(route.dtype),
            }
            answer = self._lines[process].ask(wanted, self._timeout)
            self._tell_all()
            structs = [(sizes, route.dtype, piece.target) for piece in ours]
            arrays = transfer.fetch(self._transfers[process], answer['number'], structs)
            self._await(process, arrays)
            for piece, array in zip(ours, arrays, strict=True):
                came[piece.target] = array.transpose(route.axes or range(array.ndim)).reshape(shape)
        return came

    def _tell_all(self) -> None:
        """Processes of the sender of which nothing is needed for long would take this one for dead."""
        if time.monotonic() - self._told > _OFTEN:
            for line in self._lines:
                line.ask({'asks': 'alive'}, self._timeout)
            self._told = time.monotonic()

    def _await(self, process: int, arrays: Sequence[jax.Array]) -> None:
        line = self._lines[process]
        try:
            if not transfer.come(arrays, self._timeout):
                raise line.fault(f'sent nothing for {self._timeout:.0f} s: it hangs, or is stopped')
        except jax.errors.JaxRuntimeError as error:
            raise line.fault('is gone: it ended while it sent') from error

    def done(self) -> None:
        """Tells all of them that every process of this job has everything."""
        for line in self._lines:
            line.ask({'asks': 'done'}, self._timeout)


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device of another job."""

    process: int
    id: int

    process_index = -1  # is of no process here


@dataclasses.dataclass(frozen=True)
class _Elsewhere:
    """Where an array is in another job: as much of a sharding as a move needs."""

    blocks: tuple[tuple[_Device, tuple[tuple[int, int], ...]], ...]

    addressable_devices = frozenset[Any]()

    @classmethod
    def of(cls, blocks: Sequence[Any]) -> _Elsewhere:
        """As the sender lists them."""
        return cls(tuple((_Device(*at), tuple(map(tuple, box))) for *at, box in blocks))

    def devices_indices_map(self, _: Any) -> Mapping[Any, Index]:
        return {device: tuple(slice(*pair) for pair in box) for device, box in self.blocks}

    def shard_shape(self, _: Any) -> tuple[int, ...]:
        return extent(self.blocks[0][1])


class _Sent(jax.ShapeDtypeStruct):
    """An array of another job."""

    def __init__(
        self, shape: Sequence[int], dtype: Any, weak_type: bool, where: _Elsewhere, number: int
    ) -> None:
        super().__init__(shape, dtype, weak_type=weak_type)
        self._where, self.number = where, number

    @property
    def sharding(self) -> Any:
        return self._where
