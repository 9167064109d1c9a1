"""Fixtures of campaigns; what they are made of is in `campaigns`."""

from campaigns import campaign, counting, dataset, reference_runs, training, volume

__all__ = ["campaign", "counting", "dataset", "reference_runs", "training", "volume"]
