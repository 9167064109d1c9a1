"""chaos: proof that a campaign survives.

The room of faults, experiments, verdicts and the lab (`chaos.lab`: hosts in network namespaces, a real Slurm). It may import
`resilient`; nothing imports it.
"""
