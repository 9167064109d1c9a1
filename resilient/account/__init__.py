"""The account of a campaign: what every second of every rank went into.

The time line of each job is cut at what the ledger and the metrics tell, and every stretch gets one name, so that the parts sum to
the whole by construction. Pure: lines go in, one after the other, sums come out; what is kept between two lines is bounded, however
long the campaign is, and can be written down (`resilient.past`).
"""

from resilient.account.accounting import Accounting, account
from resilient.account.parts import GOES_ON, PARTS, PLANNED, Account, Incident, Kind, Run
from resilient.account.timeline import BEFORE, BEHIND, STEP, in_order, place_of

__all__ = [
    "BEFORE",
    "BEHIND",
    "GOES_ON",
    "PARTS",
    "PLANNED",
    "STEP",
    "Account",
    "Accounting",
    "Incident",
    "Kind",
    "Run",
    "account",
    "in_order",
    "place_of",
]
