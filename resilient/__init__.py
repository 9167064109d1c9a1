"""resilient: a fault-tolerant training runtime.

`resilient run config.yaml` starts three layers of processes. The *driver* (`resilient.driver`, one per job) owns the job:
signals, generations, the ledger. The *agent* (`resilient.agent`, one per node) owns the node: it forks workers warm, watches
them, and outlives them. The *worker* (one per rank) runs the entry point that the config names and talks to the runtime
through the five calls of `resilient.worker`, all of which do nothing when no supervisor is there.

Nothing is imported here, so that `resilient --help` stays quick.
"""
