"""Where what lies in a heartbeat region: words of eight bytes, the reason to stop, and behind them the ring of records."""

PHASES = ("start", "load", "data", "step", "snapshot", "eval")
TOLD = 1 << 8  # beside the index of a phase that the script has told by itself; without it, the runtime has inferred it

# The event under which an exception travels from the worker to its agent; it is never written to the ledger.
RAISED = "raised"

NOT_BEATEN = -1  # position before the first finished step
NOT_CHECKED = -2  # no step boundary reached yet
NO_TARGET = -3

MAGIC = 0x52455349_00000005
HEADER_BYTES = 4096
RING_BYTES = 8 << 20  # a driver may be away for minutes, and steps be short
LEAST_RING_BYTES = 64 << 10
REASON_AT, REASON_BYTES = 2048, 128

# The worker writes these words, but for the magic number,
MAGIC_WORD, PID, STEP, CHECKED, PHASE, STOPPED, HEAD, DROPPED, OBSERVED, FIRST, REPORTED = range(11)
TARGET, ARMED, TAIL = 16, 17, 18  # the agent these,
BEAT_TIME, PHASE_TIME = 32, 33  # and the worker these: doubles, unix seconds,
DATA_S, FIRST_TIME, DEVICE_S = 34, 35, 36  # seconds, unix seconds, seconds.
