"""The past of a campaign: what its ledger and metrics come to, kept in a file of its own, so that nobody reads them whole.

`resilient.past.fold` has what is kept, and how a line changes it; `resilient.past.order` the order of the lines of both files, and
up to where it is final; `resilient.past.record` the file. It is made again of ledger and metrics where it is missing, damaged, or
of others.
"""
