"""Slurm: the allocation a job runs in (`allocation`), and agents started in it as steps (`launch`)."""
