"""The state of any training script, in three lines: `resilient.attach`.

Parameters and states of optimizers become global arrays (`arrays`), what else there is JSON (`documents`, `encoding`); both go the
way of every snapshot (`checkpoint.Snapshots`). Only a script that calls `attach` imports this.
"""
