"""What is found out of a training script that says nothing, from inside its process: steps, checkpoint files, where it can stop.

`progress` counts steps and beats for the script, `iterations` (pure) learns its usual iteration, `collectives` are signs of life of
a script without an optimizer, `files` notices the checkpoints that it writes, `stop` leaves its loop, `replaced` and `spawned` are
about processes that do not come from the fork server.
"""
