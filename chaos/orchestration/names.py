"""Names within a directory of results that several modules use."""

RUN = "run"
"""The run directory of the campaign under fire."""
