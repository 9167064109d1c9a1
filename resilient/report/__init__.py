"""The report of a campaign: one page of its run directory, read once from the beginning to the end, in memory that is bounded."""
