"""A model as the engine drives it: the batch of a step, how its rows are sampled, and what the
runners of all devices share."""
