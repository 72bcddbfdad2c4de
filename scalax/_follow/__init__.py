"""Following the batch: where its rows are in each value of a jaxpr, and constraints that keep them there."""
