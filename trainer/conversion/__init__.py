"""Models that come from elsewhere: what a description means, where its tensors go, and writing them as a checkpoint."""
