"""The driver, one per job: owns signals, generations, the ledger, and what a person sees.

`coordinator` decides, seeing neither socket nor process; `driver` is the shell around it; `launch` starts agents; `display` shows.
torch is never imported here.
"""
