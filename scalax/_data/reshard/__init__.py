"""Moving a state between meshes: the schedule of blocks, and the device programs that move them.

A state is never joined while it moves. `block_schedule` knows no devices: from the owners and the
destinations of each block it makes steps in which each device sends at most one piece and receives at most
one, all of one shape. `leaf_mapping` maps source leaves to target leaves, `leaf_transfer` holds the schedule
of each leaf and the positions of its pieces in the blocks of both sides, and `device_ops` extracts, sends and
inserts pieces. Only the sending depends on processes: within one process it is `jax.device_put` between
devices, and between processes one `ppermute`.

The devices of a process extract and insert in one program over a mesh of just these devices: one compilation
for all of them, and no program of one process waits for another. Each step is waited for, so that only its
own pieces are alive. Devices do not forward what they received: replicating to many devices takes more
steps, but the code for one kind of piece is enough. On equal devices a compiled identity was no faster, so
there is no other path for them. A leaf is deleted after its last use, by address; blocks that stay are
donated to the program that copies them.
"""
