"""Channels between processes that JAX has not connected: one secret, which both sides prove.

`secret` finds the secret and decides who needs one. `session` holds the nonces of both sides and their
signatures. `lines` and `listener` carry signed lines of bounded length over TCP, `datagrams` signed messages
over UDP. Each side proves the secret by an HMAC over a nonce of each side; signatures are bound to the side
and to the position in the sequence.

Lines for jobs, datagrams for the watchdog. A watchdog of 4,096 processes over TCP would keep as many
connections at process 0, and wait for processes that are stopped. Its messages are signed datagrams: process
0 has one nonce for all, keeps one sequence number for each peer that has proved the secret, and sends data to
nobody else. A stranger therefore costs it no memory, and no response is larger than its request unless the
request is new and signed.

Who needs a secret. Any address other than the loopback address: `Sender` and `receive` raise without one.
Training must not fail for want of a watchdog, so there the processes agree at the first `should_stop`, when
the devices are in use anyway: process 0 broadcasts a secret that it makes, or proves that it has the secret
of the variable. Every process of a run on several hosts takes part in that, whatever its own variable is;
otherwise processes with different variables would wait for each other. JAX has no public way to share a
value at `initialize` that needs no devices, so a process that is stuck before the first step is named only
if the variable is set. `scalax doctor --run` needs the variable.

Launchers. SLURM, TPU pods and Kubernetes set the variable from a file or a Secret that only the user can
read. The local launcher sets none: its processes meet on the loopback address, and `scalax doctor --run`
asks them without a secret.

No transport for arrays. `jax.experimental.transfer` authenticates nobody. scalax binds what it can: the
address, random numbers of 64 bits that only holders of the secret learn, and one transfer for each number.
"""
