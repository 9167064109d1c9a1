"""Tiers: places that hold snapshots, fastest first, and how snapshots travel from one to the next.

A worker copies its state into a *slab* of shared memory (`snapshots`) and computes on. The node's *keeper* (`keeper`), a
process of its own that outlives the workers, seals the slab (checksums, `part.json`), copies it to slower tiers of the node,
keeps a replica of a buddy's part, and writes the node's share into the durable tier. Which step goes where and when a step is
whole is decided by whoever commands the keepers.
"""
