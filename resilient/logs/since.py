"""Points in time as a person writes them: `10m`, `2h`, `14:30`, `2026-01-31 14:30`. Pure."""

import re
from datetime import datetime, timedelta

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_TODAY = ("%H:%M:%S", "%H:%M")


def point(text: str, now: datetime) -> datetime:
    """The point in time, local; so long ago, or then. Raises ValueError with what may be written."""
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    for form in (*_FORMATS, *_TODAY):
        try:
            found = datetime.strptime(text.strip().replace("T", " "), form)
        except ValueError:
            continue
        return datetime.combine(now.date(), found.time()) if form in _TODAY else found
    raise ValueError(f"{text!r} is no time: write 30s, 10m, 2h or 1d for so long ago, or 14:30, or '2026-01-31 14:30'")
