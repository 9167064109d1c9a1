"""The recovery ladder: what went wrong (`symptoms`, `xids`, `faults`), and what is done about it (`policy`). Pure.

`attempts`, `rollback`, `standing` and `without_spare` are what the decision looks at beside the fault itself.
"""
