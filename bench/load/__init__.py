"""`pykernels bench load`: how long a model's weights take to be there, beside reading its files."""
