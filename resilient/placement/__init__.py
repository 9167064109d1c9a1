"""Where processes run: ranks at the cores and the memory beside their GPU, nodes in the order of the fabric.

`topology` reads sysfs; `binding` decides, purely; `applied` tells the kernel; `fabric` orders nodes, purely.
"""
