"""A device that computes nothing: how long a step of a program takes on a machine that need not be
there, from its rates alone (``machine``), as the timeline that a real step would leave."""
