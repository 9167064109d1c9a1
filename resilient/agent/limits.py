"""How long the agent waits for what, and how often it polls; all of it in one place.

All waits but those of a turn and of a moment are turns of the loop (`resilient.agent.loop`), in which the driver is answered; so
none of them must be shorter than what the driver bears. `docs/architecture.md` has them in the ladder of timeouts.
"""

TURN_S = 0.35
"""The longest turn of the loop, and so the interval at which links are sampled; to wake a processor costs more than that."""

REGION_POLL_S = 0.35
"""Between two reads of the heartbeat regions, where the driver wants reports as often."""
PROMPT_S = 0.2
"""Where the driver wants reports so often, news of the daemon does not wait for the next one: recovery time depends on it."""
QUIET_S = 1.0
"""Between two reports of heartbeats that have not changed; below `resilient.config.timeouts.SILENCE_REPORT_S`."""
UNWATCHED_S = 0.65
"""An agent that polls so much later than it should does not know who was silent meanwhile."""
STANDBY_S = 10.0
"""A rank that has not finished a step by then has a long start, or does not report any; standbys are forked then."""
STANDBY_AGAIN_S = 30.0
"""Between two tries to fork a standby where there is no room for another process."""

KILL_S = 10.0
"""A killed process that is not gone after so long sits in the kernel (state D); it is left behind rather than waited for."""
INVENTORY_S = 60.0
"""The daemon's answer to what the node holds, before the node is ready; without one it holds nothing. A machine that starts many
agents at once is slow."""
CLEAR_S = 60.0
"""The daemon's answer that it has deleted what nobody needs any more, at the end of a campaign."""
INSPECT_S = 5.0
"""An inspection of the workers; it takes less than half a second where the machine is well, and a second more for a rank that does
not let go of its interpreter."""
LAST_WORDS_S = 6.0
"""What workers that hang say before they are killed: a second for those that say nothing, up to three where a large flight recorder
is written; and then it is written to the run directory."""
WRITING_POLL_S = 0.02
"""Between two looks whether a rank still writes a checkpoint of its script's own; how long it may the driver says."""
OUTPUT_S = 0.4
"""What a worker that has ended has printed is read to its end; another process may hold its pipe open."""
OUTPUT_POLL_S = 0.005
"""Between two checks whether it is."""
OUTPUT_END_S = 2.0
"""At the agent's end: all that workers have printed is read, and their pipes are given back."""
RUN_DIR_S = 1.0
"""What the agent does in the run directory while others wait for it: records of a killed agent are left there."""
SPILL_S = 30.0
"""At the agent's end: records that the driver has not acknowledged are written to the run directory. What is not written by then
stays in RAM, where the node's next agent finds it."""
DAEMON_END_S = 2.0
"""The daemon's end after its input was closed; then it is killed, and has as long once more."""
FORK_S = 10.0
"""A fork server that has not forked by then is stopped or stuck, and replaced."""
NEXT_SERVER_S = 60.0
"""The next fork server after one that has died; the template forks it within milliseconds."""
STRAYS_S = 1.0
"""The end of what ended ranks had started, once it was killed."""
STATUS_S = 2.0
"""Between the end of a process and the fork server's word on its exit status; a server that waits for a core has `FORK_S`."""
PREPARATION_STATUS_S = 300.0
"""The exit status of a preparation that has closed its pipe: the template reaps nothing while it imports."""
STORE_TRY_S = 30.0
"""One try to open or join a generation's store, in a thread: c10d overruns its own limit twofold."""
JOIN_S = 30.0
"""All tries to join the store of another node, before this agent gives up; the driver may call the generation off before."""
