"""Batch scripts of Slurm: what a person has written, and the traps in it. Nothing of a script is ever run."""
