"""`pykernels bench tensor`: a whole model on several GPUs against one."""
