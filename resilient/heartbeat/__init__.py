"""What a worker and its agent tell each other by shared memory: `layout` of the words, `region`, `agent_side`, `worker_side`."""
