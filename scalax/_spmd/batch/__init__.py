"""The batch of a step: where it begins, and which dimensions of values are its dimensions."""
