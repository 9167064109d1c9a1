"""Fixtures of campaigns; what they are made of is in `campaigns`."""

from campaigns import campaign, counting, dataset, training, twins, volume

__all__ = ["campaign", "counting", "dataset", "training", "twins", "volume"]
