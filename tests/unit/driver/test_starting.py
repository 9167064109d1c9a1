"""What a start says that it is waiting for."""

import io

from rich.console import Console

from resilient.driver.display import PLAIN_EVERY_S, Display
from resilient.driver.starting import Stage, Starting


def test_each_stage_names_its_nodes_and_the_preparation_comes_last():
    starting = Starting()
    starting.reached(0, Stage.IMPORTS)
    starting.reached(1, Stage.STARTS)
    starting.reached(2, Stage.IMPORTS)
    told = starting.text({0: "jwb01", 2: "jwb03"}, prepared=False)
    assert told == "waiting for node 1 to start, for jwb01, jwb03 to import the entry point, and for the entry point to be prepared"
    assert Starting().text({}, prepared=False) == "waiting for the entry point to be prepared"


def test_a_node_that_is_ready_or_lost_is_not_waited_for():
    starting = Starting()
    starting.reached(0, Stage.CHECKS)
    starting.reached(1, Stage.CHECKS)
    starting.ready(0)
    assert starting.text({}, prepared=True) == "waiting for node 1 to pass the health check"
    starting.ready(1)
    starting.ready(1)
    assert starting.text({}, prepared=True) is None


def test_many_nodes_are_counted():
    starting = Starting()
    for node in range(1000):
        starting.reached(node, Stage.STARTS)
    assert starting.text({}, prepared=True) == "waiting for 1000 nodes to start"


def test_nothing_is_waited_for_once_the_first_generation_has_started():
    starting = Starting()
    starting.over()
    starting.reached(3, Stage.STARTS)  # started anew in mid-run
    assert starting.text({}, prepared=True) is None


def test_a_quick_start_says_nothing_and_a_slow_one_says_what_it_waits_for_now_and_then():
    now = [0.0]
    out = io.StringIO()
    display = Display("plain", 100, console=Console(file=out, width=140), clock=lambda: now[0])
    for _ in range(int(10 * PLAIN_EVERY_S) - 1):
        display.waiting("waiting for node 0 to start")
        now[0] += 0.1
    assert out.getvalue() == ""
    for _ in range(int(20 * PLAIN_EVERY_S)):
        now[0] += 0.1
        display.waiting("waiting for node 0 to start")
    assert 2 <= out.getvalue().count("waiting for node 0 to start") <= 3


def test_what_the_preparation_says_goes_first():
    now = [100.0]
    out = io.StringIO()
    display = Display("plain", 100, console=Console(file=out, width=140), clock=lambda: now[0])
    now[0] += 2 * PLAIN_EVERY_S
    display.preparing("tokenizing", 5, 10)
    now[0] += 0.5 * PLAIN_EVERY_S
    display.waiting("waiting for the entry point to be prepared")
    assert "waiting" not in out.getvalue()
    now[0] += PLAIN_EVERY_S
    display.waiting("waiting for the entry point to be prepared")
    assert "waiting for the entry point to be prepared" in out.getvalue()
