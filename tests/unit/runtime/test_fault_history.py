"""What decisions ask of the faults before: the answers are those of the plain definitions, which look at every fault."""

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from resilient.recovery.attempts import Attempt, got_on
from resilient.recovery.faults import Fault
from resilient.recovery.history import History

Handled = tuple[float, Fault]

attempts_of_scripts = st.builds(Attempt, st.sampled_from([None, 1, 3]), st.booleans(), st.sampled_from([5.0, 700.0]))
faults = st.builds(
    lambda kind, cause, nodes, step, attempt, files, generation: Fault(
        "g1-1", kind, cause, (), nodes, step, cause, "", 0.0, attempt=attempt, files=files, generation=generation
    ),
    st.sampled_from(["exit", "node_lost", "node_lost"]),
    st.sampled_from(["a", "b"]),
    st.sampled_from([(), (0,), (1,), (2,), (1, 2)]),
    st.sampled_from([None, 3, 4, 5]),
    st.none() | attempts_of_scripts,
    st.sampled_from([None, None, "x.bin"]),
    st.sampled_from([None, 1, 2, 3]),
)


def stretch(faults: Sequence[Fault]) -> list[Fault]:
    found: list[Fault] = []
    tried: list[Attempt] = []
    furthest = -1
    for fault in faults:
        step = -1 if fault.step is None else fault.step
        if step > furthest or (fault.attempt is not None and got_on(fault.attempt, tried)):
            found, furthest = [], step
        found.append(fault)
        if fault.attempt is not None:
            tried.append(fault.attempt)
    return found


def ended(faults: Sequence[Fault]) -> int:
    return len({(number,) if fault.generation is None else fault.generation for number, fault in enumerate(faults)})


def lost_alone(earlier: Sequence[Handled], fault: Fault, after_t: float) -> int:
    recent = [each for t, each in earlier if t > after_t and each.kind == "node_lost"]
    others = {each.generation for each in recent if each.nodes != fault.nodes}
    if fault.kind != "node_lost" or fault.generation in others:
        return 0
    return ended([*(each for each in recent if each.nodes == fault.nodes and each.generation not in others), fault])


@given(st.lists(st.tuples(st.integers(0, 3), faults), max_size=12), faults, st.integers(0, 20), st.frozensets(st.integers(0, 2)))
def test_every_question_is_answered_as_if_each_fault_were_looked_at(
    waited: list[tuple[int, Fault]], fault: Fault, after_t: int, left: frozenset[int]
):
    earlier: list[Handled] = []
    for wait_s, each in waited:
        earlier.append(((earlier[-1][0] if earlier else 0.0) + wait_s, each))

    def counts(one: Fault) -> bool:
        if one.kind == "node_lost" and one.nodes and left.issuperset(one.nodes):
            return False
        return one.files is None or fault.files is not None

    def of(which: Callable[[Fault], bool]) -> int:
        return ended([each for each in alike if which(each)])

    alike = stretch([*(each for _, each in earlier), fault])
    history = History(earlier)
    begin = history.begin(fault)
    assert [*history] == earlier and [each for _, each in history.since(begin)] == alike[:-1]
    assert history.failures(fault, begin) == of(lambda each: True)
    assert history.same(fault, begin) == of(lambda each: each.signature == fault.signature)
    assert history.at_step(fault, begin, left, counts) == of(lambda each: each.step == fault.step and counts(each))
    recent = [each for t, each in earlier if t > after_t and counts(each)]
    assert history.after(after_t, fault, left, counts) == ended([*recent, fault]) - 1
    assert history.lost_alone(after_t, fault) == lost_alone(earlier, fault, after_t)
