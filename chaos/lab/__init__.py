"""The lab: hosts in network namespaces, and a real Slurm over them, on one Linux machine.

`shape` says what a lab consists of, `host` is one host, `controller` is its Slurm, `lab` is the whole. All of it stands in
namespaces and directories of its own: no device, rule, mount, name or file of the machine is changed.
"""
