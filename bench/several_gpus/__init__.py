"""Several GPUs against one: prompts (`dslp`), prompts beside decode (`disagg`), whole models
(`tensor`)."""
