"""Has the kernel refuse calls of this process with an error, as a file system does that has lost its servers: by seccomp(2)."""

import ctypes
import os
import platform
import struct

NUMBERS = {"x86_64": {"write": 1, "rename": 82}, "aarch64": {"write": 64, "rename": 38}}.get(platform.machine(), {})

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_*
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16  # in struct seccomp_data
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl(2)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def fail(call: str, error: int, fd: int | None = None) -> None:
    """From now on and for good. Args: fd: only calls whose first argument is this descriptor."""
    steps = [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, 3 if fd is not None else 1, NUMBERS[call])]
    if fd is not None:
        steps += [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_EQUAL, 0, 1, fd)]
    steps += [(_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
