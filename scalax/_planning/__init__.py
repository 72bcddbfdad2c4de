"""Plans, and the searches that plans decide.

`compiler` lowers and compiles a step, `program` reads what the compiler wrote, `cost` counts its work, memory and
collectives, `hardware` and `time` turn counts into seconds, and `report` is the plan. `mesh_search` and `autoshard`
compare plans. Users import from `scalax.plan`.
"""
