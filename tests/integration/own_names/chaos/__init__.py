"""A package of the script's own."""

from .noise import noisy

__all__ = ["noisy"]
