"""Receiver of a tree that another job sends."""

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
from scalax._data.host.boxes import Index, box_shape
from scalax._data.reshard.block_schedule import Piece
from scalax._data.reshard.device_ops import Blocks, is_here
from scalax._data.reshard.leaf_mapping import NameMapping, insert_leaf
from scalax._data.reshard.leaf_transfer import LeafTransfer
from scalax._data.reshard.request import ReshardOptions, ReshardRequest
from scalax._data.reshard.run import start_in, transfer_leaves
from scalax._jax import transfer
from scalax.errors import TransferError
from scalax.jobs._connection import SenderConnection, check_seconds

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules import RuleLike

_GRACE = 5.0  # seconds that the sender may take to respond that there is nothing to receive
_KEEPALIVE = 1.0  # seconds between two keepalive requests
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

    Each device fetches each piece that it needs once, from a device of the sender that holds the piece.

    Args:
        helper: the helper of the mesh that receives.
        address: the address of the sender, ``'host:port'``.
        rules: as for `MeshShardingHelper.shard`, for the resulting tree.
        mapping: as for `MeshShardingHelper.reshard`.
        dtype: as for `MeshShardingHelper.reshard`.
        memory: as for `MeshShardingHelper.reshard`.
        wait: seconds to wait for the sender to listen, and then to send.
        timeout: seconds to wait for each response, and for each piece.
        secret: the secret of the `Sender`. Default: the environment variable ``SCALAX_RUN_TOKEN``.

    Returns:
        Nested dicts of jax.Arrays. Without a mapping, they have the leaf paths of the sender's tree.

    Raises:
        ArgumentError: an argument is invalid; the mapping does not fit the tree; or the address is on another
            machine, and there is no secret.
        ShardingError: the rules do not fit the tree.
        TransferError: the sender does not listen, is gone or silent, or has another secret; or another
            process of this job has failed. Then no process returns anything.

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
    job = secrets.token_hex(8)
    if processes.is_multiprocess:
        job = process_collectives.broadcast_bytes(mesh, 0, job.encode()).decode()
    join = {'asks': 'join', 'job': job, 'seconds': wait}
    join |= {'receiver': processes.position, 'receivers': len(processes.indices)}
    with contextlib.ExitStack() as connections:
        texts: list[tuple[str, str]] = []
        error: Exception | None = None
        try:
            check_seconds('receive', wait, timeout)
            options = ReshardOptions.of(mapping, dtype, False, memory)
            token = resolve_secret('receive', secret)
            senders = _Senders(connections, address, token, join, wait, timeout)
            request = ReshardRequest.of(helper, senders.tree, rules, options)
            texts = [*request.agreement_texts(), ('(the number of the tree)', str(senders.tree_number))]
            tree = transfer_leaves(request, senders.fetch)
        except Exception as fault:  # noqa: BLE001 - raised once all processes know
            error = fault
        agreement.agree(mesh, 'receive', f'{address=}', texts, _ADVICE, error, kind=TransferError)
        senders.done()
    return tree


class _Senders:
    """Connections to the processes of the sender.

    Attributes:
        tree_number: the number of the tree that they send.
        tree: the leaves of that tree as structs, in nested dicts.
    """

    def __init__(
        self,
        connections: contextlib.ExitStack,
        address: str,
        secret: bytes,
        join: Mapping[str, Any],
        wait: float,
        timeout: float,
    ) -> None:
        self._timeout, self._last_keepalive = timeout, time.monotonic()
        self._connections: list[SenderConnection] = []
        self._transfers: list[Any] = []
        addresses = [address]
        while len(self._connections) < len(addresses):
            process = len(self._connections)
            name = f'process {process} of the sender'
            connection = SenderConnection(name, addresses[process], secret, wait, timeout)
            connections.callback(connection.close)
            response = connection.request(join, wait + _GRACE)
            if not process:
                first, server = response, transfer.server(connection.local_address)
                join = {**join, 'number': first['number']}
                addresses += response['others']
            if response['number'] != first['number']:
                raise connection.fault('sends another tree than process 0: all processes have to call send')
            self._connections.append(connection)
            self._transfers.append(server.connect(response['transfer']))
        self.tree_number = first['number']
        self.tree: dict[str, Any] = {}
        shardings = [_RemoteSharding.of(blocks) for blocks in first['blocks']]
        for index, (path, shape, dtype, impl, sharding, weak) in enumerate(first['leaves']):
            leaf_dtype = dtype
            if impl:
                leaf_dtype = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype
            insert_leaf(self.tree, path, _RemoteLeaf(shape, leaf_dtype, weak, shardings[sharding], index))
        # The sender's tree may have another order: nested dicts are flattened by their keys.
        self._sender_indices = [leaf.index for leaf in jax.tree.leaves(self.tree)]

    def fetch(
        self,
        leaf: int,
        leaf_transfer: LeafTransfer,
        pieces: Sequence[Piece],
        _: Blocks,
        shape: tuple[int, ...],
    ) -> Blocks:
        """Fetches the pieces of a round that devices of this process need; see `run.Transport`."""
        pieces_by_process: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            if is_here(piece.target):
                pieces_by_process[piece.source.process].append(piece)
        received: Blocks = {}
        for process, local_pieces in pieces_by_process.items():
            sizes = leaf_transfer.in_source(box_shape(local_pieces[0].box))
            blocks = leaf_transfer.schedule.source
            parts = [
                [piece.source.id, leaf_transfer.in_source(start_in(piece, blocks[piece.source]))]
                for piece in local_pieces
            ]
            request = {
                'asks': 'parts',
                'leaf': self._sender_indices[leaf],
                'parts': parts,
                'sizes': sizes,
                'dtype': str(leaf_transfer.sent_dtype),
            }
            response = self._connections[process].request(request, self._timeout)
            self._keep_alive()
            structs = [(sizes, leaf_transfer.sent_dtype, piece.target) for piece in local_pieces]
            arrays = transfer.fetch(self._transfers[process], response['number'], structs)
            self._wait_ready(process, arrays)
            for piece, array in zip(local_pieces, arrays, strict=True):
                transposed = array.transpose(leaf_transfer.axes or range(array.ndim))
                received[piece.target] = transposed.reshape(shape)
        return received

    def _keep_alive(self) -> None:
        """Sends a keepalive to every process of the sender: one that needs to send nothing would time out."""
        if time.monotonic() - self._last_keepalive > _KEEPALIVE:
            for connection in self._connections:
                connection.request({'asks': 'alive'}, self._timeout)
            self._last_keepalive = time.monotonic()

    def _wait_ready(self, process: int, arrays: Sequence[jax.Array]) -> None:
        connection = self._connections[process]
        try:
            if not transfer.wait_ready(arrays, self._timeout):
                raise connection.fault(f'sent nothing for {self._timeout:.0f} s: it hangs, or is stopped')
        except jax.errors.JaxRuntimeError as error:
            raise connection.fault('is gone: it ended while it sent') from error

    def done(self) -> None:
        """Notifies every process of the sender that all processes of this job have received everything."""
        for connection in self._connections:
            connection.request({'asks': 'done'}, self._timeout)


@dataclasses.dataclass(frozen=True)
class _RemoteDevice:
    """A device of another job."""

    process: int
    id: int

    process_index = -1  # no process of this job


@dataclasses.dataclass(frozen=True)
class _RemoteSharding:
    """The sharding of an array of another job, with the methods that a reshard needs."""

    blocks: tuple[tuple[_RemoteDevice, tuple[tuple[int, int], ...]], ...]

    addressable_devices = frozenset[Any]()

    @classmethod
    def of(cls, blocks: Sequence[Any]) -> _RemoteSharding:
        """Parses the blocks of a response: (process, device id, box) for each device."""
        return cls(tuple((_RemoteDevice(*device), tuple(map(tuple, box))) for *device, box in blocks))

    def devices_indices_map(self, _: Any) -> Mapping[Any, Index]:
        return {device: tuple(slice(*pair) for pair in box) for device, box in self.blocks}

    def shard_shape(self, _: Any) -> tuple[int, ...]:
        return box_shape(self.blocks[0][1])


class _RemoteLeaf(jax.ShapeDtypeStruct):
    """A leaf of another job; *index* is its index among the leaves of the sender's tree."""

    def __init__(
        self, shape: Sequence[int], dtype: Any, weak_type: bool, sharding: _RemoteSharding, index: int
    ) -> None:
        super().__init__(shape, dtype, weak_type=weak_type)
        self._remote_sharding, self.index = sharding, index

    @property
    def sharding(self) -> Any:
        return self._remote_sharding
