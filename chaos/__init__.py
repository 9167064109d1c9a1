"""chaos: proof that a campaign survives.

The room in which faults, experiments, verdicts and the lab (hosts in network namespaces, a real Slurm) will live. It may
import `resilient`; nothing imports it. It is empty until its first fault is real.
"""
