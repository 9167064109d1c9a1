"""The snapshot daemon: a process of a node that holds its snapshots. It outlives the workers, and is started anew when it dies.

Started as `python -m checkpoint.daemon` by the node's agent. Its messages are in `checkpoint.protocol`: the first
line of the standard input is DaemonSettings, the others are DaemonRequests; DaemonNews go to the standard output; workers report
by datagrams, daemons of other nodes read over TCP. The end of the standard input is its only end.

What is decided for all nodes (when a step is whole, what is flushed next, what may be forgotten) is decided by the driver; a
daemon sees its own node alone. Everything that a daemon knows is on the disk or in shared memory as well: the next one finds it.

One thread, that of the event loop, owns all bookkeeping (`daemon`, `snapshots`, `buffers`, `jobs`). Threads do the work on bytes
(`buffer_files`, `transfers`, `shards`) from descriptions that do not change, and the loop takes note of the result.

Must import neither torch nor Zarr nor NumPy.
"""
