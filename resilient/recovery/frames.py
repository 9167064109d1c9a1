"""Frames of a traceback, or of a stack that faulthandler wrote: which of them are a script's own. Pure."""

import re

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+)(?P<comma>,?) in (?P<function>.+?)\s*$', re.MULTILINE)
_LIBRARY = re.compile(
    r"/(site|dist)-packages/(?!trainer/)|/lib/python\d|^<|/resilient/(agent/|imports/|entry\.py|worker\.py)|/runpy\.py$"
)


def has_frames(text: str) -> bool:
    """Whether a text is a traceback or a stack, and not just a message."""
    return _FRAME.search(text) is not None


def place(text: str) -> str:
    """The innermost frame outside libraries: file, line and function; empty where no frame says."""
    frames = list(_FRAME.finditer(text))
    if frames and not frames[0]["comma"]:
        frames.reverse()  # faulthandler puts the innermost first
    own = [frame for frame in frames if not _LIBRARY.search(frame["path"])] or frames
    return f"{own[-1]['path']}:{own[-1]['line']} in {own[-1]['function']}" if own else ""
