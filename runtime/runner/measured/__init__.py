"""Steps of a plan that are timed before it is finished."""
