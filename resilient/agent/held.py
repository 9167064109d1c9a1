"""Whether a thread is held by a GPU: it is inside one native call of torch all the time, and the interpreter is free meanwhile.

NCCL's collectives are only enqueued; who waits for one waits where the program next needs a number of the GPU (`tolist`, `item`,
`synchronize`), or where the queue of kernels is full, which may be any operation. The Python frame then stays at one instruction,
and other threads get the interpreter. What computes in Python moves on; what sleeps or reads is in a call that is not torch's.
"""

import ast
import dis
import linecache
import time
from types import CodeType, FrameType

from resilient.agent.frames import current_frames

LOOKS = 4
APART_S = (0.005, 0.011, 0.023)  # uneven: a loop must not be met at the same place each time
# Methods that wait for the GPU; of others, the module that they are called in or on must be torch's.
WAITING = frozenset({"tolist", "item", "cpu", "cuda", "to", "numpy", "nonzero", "synchronize", "wait", "copy_", "run_backward"})
_MOVING = ("JUMP", "RESUME", "NOP", "POP_JUMP", "FOR_ITER", "CACHE")  # where a thread only gives way to another


def held_in(thread: int) -> str | None:
    """The call or operation of torch that holds a thread, as it stands in the source; None if it is not held.

    Args:
        thread: its `ident`.
    """
    frame = current_frames().get(thread)
    if frame is None:
        return None
    place = frame.f_lasti
    for apart_s in APART_S:
        time.sleep(apart_s)
        if current_frames().get(thread) is not frame or frame.f_lasti != place:
            return None
    return _of_torch(frame, place)


def _of_torch(frame: FrameType, place: int) -> str | None:
    name = next((each.opname for each in dis.get_instructions(frame.f_code) if each.offset == place), "")
    if not name or name.startswith(_MOVING):
        return None
    source = _source(frame.f_code, place)
    if not name.startswith("CALL"):
        return source or name  # an operator that gives the interpreter free: of tensors
    if "/torch/" in frame.f_code.co_filename:
        return source or "a call"
    function = _function(source)
    if function is None:
        return None
    root = function
    while isinstance(root, ast.Attribute):
        root = root.value
    leaf = function.attr if isinstance(function, ast.Attribute) else None
    module = getattr(frame.f_globals.get(root.id), "__name__", "") if isinstance(root, ast.Name) else ""
    return source if leaf in WAITING or str(module).partition(".")[0] == "torch" else None


def _source(code: CodeType, place: int) -> str:
    """What stands in the source at an instruction; empty where that is not known."""
    for number, (first, last, start, end) in enumerate(code.co_positions()):
        if number * 2 == place and first is not None and last is not None and start is not None and end is not None:
            lines = [line.rstrip("\n").encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
            if len(lines) != last - first + 1:
                return ""
            lines[-1] = lines[-1][:end]
            lines[0] = lines[0][start:]
            return " ".join(line.decode(errors="replace").strip() for line in lines)
    return ""


def _function(source: str) -> ast.expr | None:
    """What is called by an expression."""
    try:
        found = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found.func if isinstance(found, ast.Call) else None
