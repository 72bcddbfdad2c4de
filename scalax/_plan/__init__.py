"""Plans: memory, communication and time of a step, read from the compiler's output before any run.

`make` compiles a function (`compilation`) and parses the program (`hlo`); `collectives`, `flops`, `hlo_cost`
and `memory` count, `torus` and `roofline` turn counts into seconds. The result is a `plan`, which `blocks`
show. Users import from `scalax.plan`.
"""
