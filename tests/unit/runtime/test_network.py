"""What the communication libraries find in the environment: values, ranges, who wins, and the time that they cover."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from resilient.config import ConfigError, load
from resilient.config.sections.machines import Network
from resilient.network import VARIABLES, covered, dump_files, environment, ib_covered_s, ib_timeout_for, tcp_covered_s, ucx_seconds

OUT_OF_RANGE = [
    ("NCCL_IB_TIMEOUT", "50"),  # as scripts in circulation have it
    ("NCCL_IB_TIMEOUT", "0"),
    ("NCCL_IB_TIMEOUT", "18.5"),
    ("NCCL_IB_RETRY_CNT", "10"),
    ("NCCL_IB_RETRY_CNT", "-1"),
    ("UCX_RC_TIMEOUT", "0s"),
    ("UCX_RC_TIMEOUT", "3 minutes"),
    ("UCX_RC_TIMEOUT", "10000s"),
    ("UCX_RC_RETRY_COUNT", "8"),
    ("NCCL_SOCKET_IFNAME", "ib 0"),
    ("GLOO_SOCKET_IFNAME", "^docker"),  # NCCL's way of saying it, which gloo takes for a name
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4"),
    ("NCCL_ASYNC_ERROR_HANDLING", "yes"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "0"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", ""),  # torch reads a number from it, and fails
    ("TORCH_FR_BUFFER_SIZE", "-1"),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "many"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "on"),
    ("NCCL_DEBUG", "LOUD"),
    ("TORCH_DISTRIBUTED_DEBUG", "ON"),
]
IN_RANGE = [
    ("NCCL_IB_TIMEOUT", "1"),
    ("NCCL_IB_TIMEOUT", "22"),
    ("NCCL_IB_RETRY_CNT", "0"),
    ("UCX_RC_TIMEOUT", "3s"),
    ("UCX_RC_TIMEOUT", "1000000.00us"),
    ("NCCL_SOCKET_IFNAME", "^docker,lo"),
    ("NCCL_SOCKET_IFNAME", "=ib0,=ib1"),
    ("NCCL_DEBUG", "info"),
    ("NCCL_DEBUG", ""),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true"),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_also_from_the_environment(name: str, value: str):
    with pytest.raises(ConfigError) as refused:
        environment(Network(), {name: value}, one_machine=False)
    assert str(refused.value).startswith(f"environment: {name} = {value}: allowed: ")
    assert refused.value.code == 78


@pytest.mark.parametrize(("name", "value"), IN_RANGE)
def test_a_value_in_range_is_left_as_it_is(name: str, value: str):
    assert environment(Network(), {name: value}, one_machine=False) == {}


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        environment(Network(), {"NCCL_IB_TIMEOUT": "50", "NCCL_IB_RETRY_CNT": "10"}, one_machine=False)
    assert [problem.key for problem in refused.value.problems] == ["NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"]


def test_nothing_is_set_that_nobody_asked_for():
    assert environment(Network(), {}, one_machine=False) == {}


def test_on_one_machine_gloo_takes_the_loopback_unless_told_otherwise():
    assert environment(Network(), {}, one_machine=True) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert environment(Network(), {"GLOO_SOCKET_IFNAME": "eth0"}, one_machine=True) == {}
    assert environment(Network(interface="ib0"), {}, one_machine=True)["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_config_wins_over_the_environment_whatever_that_says():
    found = environment(Network(ib_timeout=21, heartbeat_s=60), {"NCCL_IB_TIMEOUT": "50", "NCCL_DEBUG": "WARN"}, one_machine=False)
    assert found == {"NCCL_IB_TIMEOUT": "21", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}


def test_an_older_name_in_the_environment_follows_the_config():
    found = environment(Network(flight_recorder=500), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20"}, one_machine=False)
    assert found == {"TORCH_FR_BUFFER_SIZE": "500", "TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}


def test_every_key_of_the_config_becomes_a_value_that_would_be_accepted():
    network = Network(
        interface="ib0",
        ib_timeout=20,
        ib_retries=5,
        ucx_rc_timeout_s=1.5,
        async_error_handling=3,
        heartbeat_s=300,
        flight_recorder=2000,
        dump_on_timeout=True,
        nccl_debug="warn",
        torch_debug="detail",
    )
    found = environment(network, {}, one_machine=False)
    assert found == {
        "NCCL_IB_TIMEOUT": "20",
        "NCCL_IB_RETRY_CNT": "5",
        "UCX_RC_TIMEOUT": "1500000us",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": "WARN",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    good = {variable.name: variable.is_good for variable in VARIABLES}
    assert all(good[name](value) for name, value in found.items())


@pytest.mark.parametrize(
    "values",
    [
        {"ib_timeout": 23},
        {"ib_timeout": 0},
        {"ib_retries": 8},
        {"link_down_s": 121},
        {"async_error_handling": 4},
        {"nccl_debug": "x"},
    ],
)
def test_the_config_is_held_to_the_same_ranges(values: dict[str, object]):
    with pytest.raises(ValidationError):
        Network.model_validate(values)


def test_a_dump_without_a_recorder_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"network\.dump_on_timeout = true: there is nothing to dump"):
        environment(Network(dump_on_timeout=True, flight_recorder=0), {}, one_machine=False)
    with pytest.raises(ConfigError, match="environment: TORCH_NCCL_DUMP_ON_TIMEOUT = 1: there is nothing"):
        environment(Network(flight_recorder=0), {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, one_machine=False)


def test_an_outage_is_given_instead_of_the_pair_that_covers_it(tmp_path: Path):
    found = environment(Network(link_down_s=60), {}, one_machine=False)
    assert (found["NCCL_IB_TIMEOUT"], found["NCCL_IB_RETRY_CNT"]) == ("21", "7")
    path = tmp_path / "config.yaml"
    path.write_text("network: {link_down_s: 60, ib_timeout: 22}\n")
    with pytest.raises(ConfigError, match=r"config.yaml:1: network.ib_timeout = 22: link_down_s chooses it"):
        load(path)


@pytest.mark.parametrize(("timeout", "seconds"), [(18, 7.5), (20, 30.1), (21, 60.1), (22, 120.3)])
def test_the_time_that_a_pair_covers(timeout: int, seconds: float):
    assert ib_covered_s(timeout, 7) == pytest.approx(seconds, abs=0.05)


@pytest.mark.parametrize(("seconds", "timeout"), [(7.5, 18), (7.6, 19), (60, 21), (60.2, 22), (120, 22), (1e-9, 1)])
def test_the_timeout_is_the_smallest_that_covers(seconds: float, timeout: int):
    assert ib_timeout_for(seconds) == timeout


def test_no_timeout_covers_an_hour():
    with pytest.raises(ValueError, match="3600"):
        ib_timeout_for(3600)


def test_linux_resends_for_about_a_quarter_of_an_hour():
    assert tcp_covered_s(15) == pytest.approx(924.6)  # the figure of the kernel's ip-sysctl.rst
    assert tcp_covered_s(0) == pytest.approx(0.2)


def test_times_of_ucx():
    assert [ucx_seconds(text) for text in ("3s", "500ms", "2000us", "2", "1.5m", "soon")] == [3, 0.5, 0.002, 2, 90, None]


def test_what_is_covered_is_said_in_a_line():
    assert covered({"NCCL_IB_TIMEOUT": "18"}, 15) == "7.5 s on InfiniBand, 925 s over TCP"
    assert covered({}, 8) == "30.1 s on InfiniBand by default, 102 s over TCP"


def test_the_flight_recorder_writes_beside_the_logs_unless_told_otherwise(tmp_path: Path):
    assert dump_files({}, tmp_path) == {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_trace_rank_"}
    assert dump_files({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x"}, tmp_path) == {}


def test_the_command_line_refuses_before_anything_is_started(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\n")
    found = subprocess.run(
        [sys.executable, "-m", "resilient", "run", str(path)],
        env={**os.environ, "NCCL_IB_TIMEOUT": "50"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 78
    assert found.stderr == "environment: NCCL_IB_TIMEOUT = 50: allowed: a whole number, at least 1 and at most 22\n"
    assert not (tmp_path / "run").exists()
