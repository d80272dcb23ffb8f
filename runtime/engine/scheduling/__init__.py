"""Which tokens of which requests make up a step, and the arrays that say so."""
