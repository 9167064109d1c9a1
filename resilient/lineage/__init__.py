"""Campaigns that come of others: `fork` branches one off at a checkpoint, `duplicate` gives files a second name or copies them,
`difference` (pure) and `comparison` say how two campaigns differ."""
