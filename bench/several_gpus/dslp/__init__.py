"""`pykernels bench dslp`: streamed prompts on several GPUs against one."""
