"""A GPU's cache of experts: what it would hit, from recorded choices, and what it gains."""
