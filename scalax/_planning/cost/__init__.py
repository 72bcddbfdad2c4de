"""The cost of one call of a step on each device: FLOPs, HBM traffic, memory, collectives, host transfers."""
