"""`pykernels bench contexts`: decode at growing contexts, measured and predicted."""
