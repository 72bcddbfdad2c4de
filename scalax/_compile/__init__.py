"""Functions of the user's that become others: `sjit`, `shard_map`, `microbatch`.

What they share is in `calls`: the signature of a call, the shardings of its arguments, their placement.
"""
