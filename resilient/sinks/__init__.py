"""Sinks: where metrics and events of a campaign go beside its run directory.

A process of its own (`process`), which the driver starts and does not wait for, follows `events.jsonl` and `metrics.jsonl`. Each
sink has a thread (`pump`) and an offset of its own in them (`position`), so that one that hangs or fails holds up neither training
nor another sink, and goes on where it was. `base` is the interface; other packages add sinks by the entry-point group
`resilient.sinks`.
"""
