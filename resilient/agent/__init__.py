"""The agent, one per node: forks the workers warm, watches them, and outlives them.

It does what the driver says and tells the driver what it sees; it decides nothing but one thing: without a word from the driver
for `fence_s`, it kills its workers and goes.
"""

NAME = "agent"  # of its process, as `ps -e` shows it
