"""Transfer of arrays to another job, such as from a trainer to the samplers of its model.

Two jobs are programs, of one or several processes each, that JAX has not joined. A `Sender` holds the state,
and `receive` fetches it into the shardings that rules give on the receiver's mesh. Each process of the
receiver requests the pieces that its devices need from each process of the sender. Requests and responses
are lines of JSON over TCP, signed with a secret that both jobs have: an argument, or the environment variable
``SCALAX_RUN_TOKEN``. Without a secret, both jobs have to run on one machine. `jax.experimental.transfer`
sends the arrays. Nothing is encrypted.
"""

from scalax.jobs._receive import receive
from scalax.jobs._sender import Sender

__all__ = ['Sender', 'receive']
