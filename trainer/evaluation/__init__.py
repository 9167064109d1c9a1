"""Evaluation of checkpoints: `trainer evaluate`.

`measure` computes, `sizes` knows the bytes of tokens, `records` keeps what was found, `command` is what the command line calls.
"""
