"""The batch of a step: its arguments, its sources inside the step, and the batch dimensions of values."""
