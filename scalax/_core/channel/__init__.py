"""Channels between processes that JAX has not joined, or does not let talk: one secret, proved by both sides.

`secret` says which one, and who needs one. `session` has the nonces of both sides and what each signs with
them. `lines` and `listener` carry signed lines of bounded length over TCP, `datagrams` signed messages over
UDP.
"""
