"""Resharding of a tree between meshes: the schedule of blocks, and the programs that move them.

No array is gathered on the way. `block_schedule` does not depend on JAX devices: from the senders and the
receivers of each block it makes rounds in which each device sends at most one piece and receives at most one,
all of one shape. `leaf_mapping` maps source leaves to target leaves, `leaf_transfer` holds the schedule
of each leaf and the positions of its pieces in the blocks of both sides, and `device_ops` extracts, sends and
inserts pieces. Only the sending depends on processes: within one process it is `jax.device_put` between
devices, and between processes one `ppermute`.

The devices of a process extract and insert in one program over a mesh of just these devices: one compilation
for all of them, and no program of one process waits for another. The host waits for each round, so that only
the pieces of one round are alive. Devices do not forward pieces that they received: replicating to many
devices takes more rounds, but one kind of piece is enough. Source and target on the same devices have no
special path, because a compiled identity was no faster. A leaf is deleted after its last use, by address;
blocks that stay are donated to the program that copies them.
"""
