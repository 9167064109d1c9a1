"""The chain as a table: what records, the queue and exit codes come to."""

import pytest

from resilient.exits import Exit
from resilient.slurm.chain import GOES_ON, STUCK, Cancel, Chain, Plan, Submit, fold, name, on_end, on_start, on_submit, standing
from resilient.slurm.queue import QueuedJob

OWN = QueuedJob("7", "RUNNING")
NEXT, SURPLUS, FADING = QueuedJob("8", "PENDING"), QueuedJob("9", "PENDING"), QueuedJob("6", "COMPLETING")
GOING = Chain(("5", "7"), (0, 40))


@pytest.mark.parametrize(
    ("queue", "submits"), [([], True), ([OWN], False), ([NEXT], False), ([OWN, NEXT], False), ([FADING], True)]
)
def test_a_chain_is_begun_only_where_none_is(queue, submits):
    assert on_submit(Chain(), queue) == Plan((Submit(None),) if submits else ())


@pytest.mark.parametrize(
    ("chain", "queue", "actions"),
    [
        (Chain(over=Exit.STOPPED), [OWN], (Submit(None),)),  # it drains
        (Chain(over=Exit.GAVE_UP), [NEXT], (Cancel("8"), Submit(None))),  # it could not be cancelled, and has an older script
        (Chain(former=frozenset("7")), [OWN], (Submit(None),)),  # the submission has come to nothing so far
        (Chain(former=frozenset("7")), [OWN, NEXT], ()),
        (Chain(former=frozenset("67")), [OWN, QueuedJob("6", "PENDING"), NEXT], ()),
        (GOING, [OWN], (Submit(None),)),  # the last of its chain
        (GOING, [OWN, NEXT], ()),
        (Chain(("5",), (0,)), [OWN], ()),  # it has not begun to work, and will see to the next
        (Chain(behind=frozenset("7")), [OWN], (Submit(None),)),  # the submission has come to nothing so far
    ],
)
def test_neither_jobs_of_a_chain_that_is_over_nor_its_last_job_keep_another_one_from_being_begun(chain, queue, actions):
    assert on_submit(chain, queue) == Plan(actions)


@pytest.mark.parametrize(
    ("chain", "queue", "actions", "why"),
    [
        (GOING, [OWN], (Submit("7"),), ""),
        (GOING, [FADING, OWN], (Submit("7"),), ""),
        (GOING, [OWN, NEXT], (), ""),
        (GOING, [OWN, NEXT, SURPLUS], (Cancel("9"),), ""),
        (Chain(("5", "6", "7"), (0, 20, 40)), [OWN], (), "job 3 of the chain, and slurm.max_jobs is 3"),
        (Chain(("5", "6", "7"), (0, 20, 40)), [OWN, NEXT], (Cancel("8"),), "slurm.max_jobs"),
        (Chain(("7",), (0,), Exit.GAVE_UP), [OWN, NEXT], (Cancel("8"),), "the chain is over"),
        (Chain(("7",), (0,), Exit.STOPPED), [OWN], (), "the chain is over"),
    ],
)
def test_exactly_one_job_waits_behind_the_one_that_runs(chain, queue, actions, why):
    plan = on_start(chain, "7", queue, max_jobs=3)
    assert plan.actions == actions
    assert why in plan.why_none
    assert bool(plan.why_none) == bool(why)


@pytest.mark.parametrize(("jobs", "stuck"), [(STUCK, False), (STUCK + 1, True)])
def test_jobs_that_make_nothing_durable_are_not_followed_for_ever(jobs, stuck):
    chain = Chain(tuple(map(str, range(jobs))), (0, 10, *[40] * jobs)[2:])
    assert chain.stuck == stuck
    assert bool(on_start(chain, "7", [OWN], max_jobs=50).why_none) == stuck
    assert not Chain(chain.jobs, (*chain.steps, 41)).stuck  # progress forgets it
    assert not Chain(chain.jobs, (None,) * jobs).stuck  # nobody knows


@pytest.mark.parametrize(
    ("durable", "metrics_step", "step"),
    [([5, 40], 44, 40), ([], 43, 43), ([], None, None), ([0], None, None)],
)
def test_a_campaign_stands_at_its_newest_checkpoint_or_where_its_script_says(durable, metrics_step, step):
    assert standing(durable, metrics_step) == step


@pytest.mark.parametrize(
    ("code", "cancels"),
    [(Exit.OK, True), (Exit.GAVE_UP, True), (Exit.CONFIG, True), (Exit.STOPPED, False), (Exit.UNUSABLE, False)],
)
def test_the_exit_code_decides_whether_the_next_job_is_needed(code, cancels):
    chain = fold(
        [{"what": "begun"}, {"what": "started", "job": "7", "step": 0}, {"what": "ended", "job": "7", "exit_code": int(code)}]
    )
    assert on_end(chain, "7", [OWN, NEXT]) == Plan((Cancel("8"),) if cancels else ())
    assert (chain.over is not None) == cancels


def test_a_stop_that_somebody_asks_for_is_the_end_of_the_chain():
    chain = fold([{"what": "begun"}, {"what": "stopped"}])
    assert on_end(chain, "7", [OWN, NEXT]) == Plan((Cancel("8"),))


def test_a_chain_that_is_over_is_begun_again_by_whoever_submits():
    records = [
        {"what": "begun", "name": "x-1"},
        {"what": "started", "job": "7", "step": 0},
        {"what": "ended", "job": "7", "exit_code": 70},
    ]
    assert fold(records) == Chain(("7",), (0,), Exit.GAVE_UP)
    assert fold([*records, {"what": "begun", "name": "x-1"}, {"what": "submitted", "job": "9"}]) == Chain()
    assert (name(records), name([])) == ("x-1", None)


@pytest.mark.parametrize("code", Exit)
def test_a_job_of_an_earlier_chain_ends_no_later_one_unless_it_begins_in_it(code: Exit):
    begun = [{"what": "begun", "name": "x-1", "former": ["7"]}]
    ended = {"what": "ended", "job": "7", "exit_code": int(code)}
    found = fold([*begun, ended])
    assert (found.over, on_end(found, "7", [OWN, NEXT])) == (None, Plan())
    requeued = fold([*begun, {"what": "started", "job": "7", "step": 5}, ended])
    assert (requeued.jobs, requeued.over) == (("7",), None if code in GOES_ON else code)


def test_a_job_that_ended_without_a_word_is_followed():
    assert fold([{"what": "begun"}, {"what": "started", "job": "7", "step": 5}]) == Chain(("7",), (5,))
