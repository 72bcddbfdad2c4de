"""Sending arrays to another job, such as from a trainer to the samplers of its model.

Two jobs are programs, of one or several processes each, that JAX has not joined. A `Sender` has the state;
`receive` fetches it, straight into the shardings that rules give on the receiver's mesh. Each process of the
receiver asks each process of the sender for the pieces that its devices need. Questions and answers are lines
of JSON over TCP, signed with a secret that both jobs have: an argument, or the environment variable
``SCALAX_RUN_TOKEN``. Without a secret, jobs meet on one machine only. Arrays go by
`jax.experimental.transfer`. Nothing is encrypted.
"""

from scalax.jobs._receive import receive
from scalax.jobs._sender import Sender

__all__ = ['Sender', 'receive']
