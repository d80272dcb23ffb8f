"""The simulated device beside what was measured: our own committed runs, and the papers'
evaluation."""
