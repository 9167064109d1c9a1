"""Tiers: places that hold snapshots, fastest first, and how snapshots travel from one to the next.

A worker copies its state into a *buffer* of shared memory (`snapshots`) and computes on. The node's snapshot daemon
(`checkpoint.daemon`), a process of its own that outlives the workers, seals the buffer (checksums, `part.json`), copies it to
slower tiers of the node, keeps a replica of a buddy's shard, and writes the node's shard into the durable tier. Which step goes
where and when a step is whole is decided by whoever commands the daemons.

Here is what workers need, and what they share with the daemon.
"""
