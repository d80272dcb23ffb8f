"""What a model becomes once it is loaded, told from its headers or its configuration alone."""
