"""Plans: what a compiled step holds, sends and takes, read from what the compiler writes, before any run.

`make` compiles a function (`compilation`) and reads the program (`hlo`); `collectives`, `flops`, `hlo_cost`
and `memory` count, `torus` and `roofline` turn counts into seconds. The result is a `plan`, which `text`,
`page`, `png` and `plan_json` show and store. Users import from `scalax.plan`.
"""
