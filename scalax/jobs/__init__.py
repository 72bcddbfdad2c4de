"""Sending arrays to another job, such as from a trainer to the samplers of its model.

Two jobs are programs, of one or several processes each, that JAX has not joined. A `Sender` has the state;
`receive` fetches it, straight into the shardings that rules give on the receiver's mesh. Each process of the
receiver asks each process of the sender for the pieces that its devices need. Questions and answers are lines
of JSON over TCP, and arrays go by `jax.experimental.transfer`. Neither encrypts or checks who asks: use it
inside a network that nobody else is in.
"""

from scalax.jobs._receive import receive
from scalax.jobs._sender import Sender

__all__ = ['Sender', 'receive']
