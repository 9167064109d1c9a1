"""Adapters for training frameworks, each in a module that imports its framework; nothing else of resilient imports them."""
