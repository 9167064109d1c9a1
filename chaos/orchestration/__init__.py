"""An experiment while it runs: where, in what order, and what ends it."""
