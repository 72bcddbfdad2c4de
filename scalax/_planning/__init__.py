"""Plans, and the searches that compare plans.

`compiler` lowers and compiles a step, `program` reads the output of the compiler, `cost` counts work, memory
and collectives, `hardware` and `time` turn the counts into seconds, and `report` is the plan. Two searches,
`mesh_search` and `autoshard`, compare plans. Users import from `scalax.plan`.
"""
