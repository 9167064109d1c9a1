"""The environment of NCCL, gloo, UCX and torch's process groups: the one place that sets and checks it.

Pure: a config and an environment come in, the variables to set come out. What the config says wins over the environment, the
environment over the libraries' defaults, and nothing is set that nobody asked for. A value out of range is refused wherever it
comes from, because the libraries do not: InfiniBand drivers cut it to its low bits, and a limit that was meant to be long is short.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from resilient.config.errors import ENVIRONMENT, ConfigError, Problem
from resilient.config.sections.machines import IB_RETRIES, IB_TICK_S, IB_TIMEOUTS, Network

# NCCL's own values, where nobody sets any. The exponent is that of 2.23 and later; it was 18 before.
NCCL_IB_TIMEOUT_DEFAULT = 20
NCCL_IB_RETRY_DEFAULT = 7

_INTERFACE = r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*"
_UCX_UNITS_S = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "m": 60.0}
_UCX_LIMIT_S = IB_TICK_S * 2.0**31
_NCCL_DEBUG = ("VERSION", "WARN", "INFO", "TRACE")
_TORCH_DEBUG = ("OFF", "INFO", "DETAIL")
_YES, _NO = ("1", "y", "yes", "t", "true"), ("0", "n", "no", "f", "false")


@dataclass(frozen=True)
class Variable:
    """One variable of the environment.

    Attributes:
        allowed: what it may be, in words.
        is_good: whether a text is that.
        legacy: other names that mean the same; they are checked as well, and follow where the config sets a value.
    """

    name: str
    allowed: str
    is_good: Callable[[str], bool]
    legacy: tuple[str, ...] = ()


def _whole(least: int, most: int | None = None) -> tuple[str, Callable[[str], bool]]:
    words = f"a whole number, at least {least}" + (f" and at most {most}" if most is not None else "")

    def is_good(text: str) -> bool:
        return re.fullmatch(r"\d{1,9}", text) is not None and least <= int(text) and (most is None or int(text) <= most)

    return words, is_good


def _one_of(*choices: str) -> tuple[str, Callable[[str], bool]]:
    return ", ".join(choices), lambda text: text.upper() in {choice.upper() for choice in choices}


def _matches(pattern: str, words: str) -> tuple[str, Callable[[str], bool]]:
    return words, lambda text: re.fullmatch(pattern, text) is not None


VARIABLES: tuple[Variable, ...] = (
    Variable("NCCL_IB_TIMEOUT", *_whole(*IB_TIMEOUTS)),
    Variable("NCCL_IB_RETRY_CNT", *_whole(*IB_RETRIES)),
    Variable(
        "UCX_RC_TIMEOUT",
        f"a time such as 3s or 500000us, above 0 and at most {_UCX_LIMIT_S:.0f}s",
        lambda text: (seconds := ucx_seconds(text)) is not None and 0 < seconds <= _UCX_LIMIT_S,
    ),
    Variable("UCX_RC_RETRY_COUNT", *_whole(*IB_RETRIES)),
    Variable(
        "NCCL_SOCKET_IFNAME",
        *_matches(rf"\^?=?{_INTERFACE}(,=?{_INTERFACE})*", "interfaces as in ib0 or eth,=ib0 or ^docker,lo"),
    ),
    Variable("GLOO_SOCKET_IFNAME", *_matches(rf"{_INTERFACE}(,{_INTERFACE})*", "names of interfaces, as in ib0 or ib0,ib1")),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", *_whole(0, 3), ("NCCL_ASYNC_ERROR_HANDLING",)),
    Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", *_whole(1)),
    Variable("TORCH_FR_BUFFER_SIZE", *_whole(0), ("TORCH_NCCL_TRACE_BUFFER_SIZE",)),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", *_one_of(*_YES, *_NO)),
    Variable("NCCL_DEBUG", *_one_of(*_NCCL_DEBUG)),
    Variable("TORCH_DISTRIBUTED_DEBUG", *_one_of(*_TORCH_DEBUG)),
)


def environment(network: Network, environ: Mapping[str, str], *, one_machine: bool) -> dict[str, str]:
    """The variables to set for the agents and their workers, on top of `environ`.

    Args:
        network: the config's section.
        environ: what the agents inherit.
        one_machine: whether all agents run on this machine.

    Raises:
        ConfigError: a variable is out of range, or what the config and the environment say together contradicts itself.
    """
    wanted = _from_config(network)
    if one_machine and "GLOO_SOCKET_IFNAME" not in {*environ, *wanted}:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # all agents are on this machine, whatever its name resolves to
    for variable in VARIABLES:
        if variable.name in wanted:
            wanted |= {name: wanted[variable.name] for name in variable.legacy if name in environ}
    problems = [*_out_of_range({**environ, **wanted}), *_contradictions({**environ, **wanted}, network)]
    if problems:
        raise ConfigError(problems)
    return wanted


def dump_files(environ: Mapping[str, str], log_dir: Path) -> dict[str, str]:
    """Where the flight recorder of the ranks of one generation writes: beside their logs, unless `environ` says where."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return {} if any(name in environ for name in names) else {names[0]: str(log_dir / "nccl_trace_rank_")}


def _from_config(network: Network) -> dict[str, str]:
    """What the config asks for."""
    timeout, retries, ucx_s = network.ib_timeout, network.ib_retries, network.ucx_rc_timeout_s
    if network.link_down_s is not None:
        timeout, retries = ib_timeout_for(network.link_down_s), IB_RETRIES[1]
    asked = {
        "NCCL_IB_TIMEOUT": timeout,
        "NCCL_IB_RETRY_CNT": retries,
        "UCX_RC_TIMEOUT": None if ucx_s is None else f"{round(ucx_s * 1e6)}us",
        # NCCL takes names for prefixes unless told otherwise: eth1 would be eth10 as well.
        "NCCL_SOCKET_IFNAME": None if network.interface is None else f"={network.interface}",
        "GLOO_SOCKET_IFNAME": network.interface,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": network.async_error_handling,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": network.heartbeat_s,
        "TORCH_FR_BUFFER_SIZE": network.flight_recorder,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": None if network.dump_on_timeout is None else int(network.dump_on_timeout),
        "NCCL_DEBUG": None if network.nccl_debug is None else network.nccl_debug.upper(),
        "TORCH_DISTRIBUTED_DEBUG": None if network.torch_debug is None else network.torch_debug.upper(),
    }
    return {name: str(value) for name, value in asked.items() if value is not None}


def _out_of_range(merged: Mapping[str, str]) -> Iterator[Problem]:
    for variable in VARIABLES:
        for name in (variable.name, *variable.legacy):
            empty = not merged.get(name) and not name.startswith("TORCH_")  # NCCL, gloo and UCX take it for unset
            if name in merged and not empty and not variable.is_good(merged[name]):
                yield Problem(name, merged[name], f"allowed: {variable.allowed}", line=ENVIRONMENT)


def _contradictions(merged: Mapping[str, str], network: Network) -> Iterator[Problem]:
    entries = merged.get("TORCH_FR_BUFFER_SIZE", merged.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    if merged.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "").lower() in _YES and entries == "0":
        message = "there is nothing to dump while the flight recorder keeps 0 entries; allowed: false, or more entries"
        if network.dump_on_timeout:
            yield Problem("network.dump_on_timeout", network.dump_on_timeout, message)
        else:
            yield Problem("TORCH_NCCL_DUMP_ON_TIMEOUT", merged["TORCH_NCCL_DUMP_ON_TIMEOUT"], message, line=ENVIRONMENT)


# -- the time that settings cover --------------------------------------------------------------------------------------


def ib_covered_s(timeout: int, retries: int) -> float:
    """How long an InfiniBand port may be down until a queue pair breaks: 4.096 µs × 2^timeout for each of its retries."""
    return IB_TICK_S * 2.0**timeout * retries


def ib_timeout_for(link_down_s: float) -> int:
    """The smallest NCCL_IB_TIMEOUT with which a port may be down for so long, at the most retries that there are.

    Raises:
        ValueError: no timeout is long enough.
    """
    for timeout in range(IB_TIMEOUTS[0], IB_TIMEOUTS[1] + 1):
        if ib_covered_s(timeout, IB_RETRIES[1]) >= link_down_s:
            return timeout
    raise ValueError(f"no InfiniBand timeout covers {link_down_s:g} s")


def tcp_covered_s(retries: int, *, first_s: float = 0.2, longest_s: float = 120.0) -> float:
    """How long Linux resends on a TCP connection that hears nothing: each wait is twice the one before, up to the longest.

    Args:
        retries: `net.ipv4.tcp_retries2`.
    """
    return sum(min(first_s * 2.0**number, longest_s) for number in range(retries + 1))


def ucx_seconds(text: str) -> float | None:
    """A time as UCX writes it, in seconds; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)(m|s|ms|us|ns)?", text)
    return float(found[1]) * _UCX_UNITS_S[found[2] or ""] if found is not None else None


def covered(environ: Mapping[str, str], tcp_retries: int) -> str:
    """What outages of a link the libraries bear by themselves, in words.

    Args:
        environ: of the workers, checked.
        tcp_retries: `net.ipv4.tcp_retries2` of this machine.
    """
    timeout = int(environ.get("NCCL_IB_TIMEOUT") or NCCL_IB_TIMEOUT_DEFAULT)
    retries = int(environ.get("NCCL_IB_RETRY_CNT") or NCCL_IB_RETRY_DEFAULT)
    said = "" if environ.get("NCCL_IB_TIMEOUT") else " by default"
    return f"{ib_covered_s(timeout, retries):.1f} s on InfiniBand{said}, {tcp_covered_s(tcp_retries):.0f} s over TCP"
