"""A kernel after an edit: is it right, and how fast beside the committed one."""
