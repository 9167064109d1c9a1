"""State as JSON: everything that state dicts are made of comes back as it was, and nothing else is taken."""

import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from resilient.state import randomness
from resilient.state.documents import Documents, capacity
from resilient.state.encoding import decode, encode
from resilient.state.modules import ModelTensors
from resilient.state.position import Position
from resilient.state.restored import Restoring


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


VALUES = [
    None,
    {"a": [1, 2.5, True, "x"], "b": {"c": ()}},
    {1: "one", (2, 3): "two", None: 0},
    Counter([2, 2, 8]),
    {"$tuple": [1]},
    (1, [2, (3,)]),
    {1, 2},
    frozenset([3]),
    b"\0\xff",
    bytearray(b"x"),
    math.inf,
    -math.inf,
    1 << 90,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value: Any):
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


def test_a_value_that_is_no_number_comes_back():
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    value = (torch.rand(shape) * 4).to(dtype)
    found = there_and_back(value)
    assert (found.dtype, found.shape) == (dtype, value.shape)
    assert found.reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()


def test_a_view_of_one_element_comes_back():
    assert there_and_back(torch.arange(6.0).reshape(2, 3)[:1, 1]).tolist() == [1.0]


def test_views_of_conjugates_come_back_as_their_values():
    value = torch.tensor([1 + 2j]).conj()
    assert [there_and_back(each).tolist() for each in (value, value.imag)] == [[1 - 2j], [-2.0]]


def test_arrays_of_numpy_come_back():
    value = {"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "b": np.float64(0.1)}
    found = there_and_back(value)
    assert found["a"].dtype == np.uint32 and (found["a"] == value["a"]).all()
    assert repr(found["b"]) == repr(value["b"])


def test_dicts_and_numbers_of_classes_of_their_own_come_back_plain():
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}


@pytest.mark.parametrize("value", [lambda: 0, object(), {"a": [print]}, np.array([object()])])
def test_what_would_need_pickle_is_refused_by_name(value: Any):
    with pytest.raises(TypeError, match=r"extra.* cannot be saved without pickle"):
        encode(value, "extra")


def test_what_contains_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested"):
        encode(value)


@pytest.mark.parametrize("damaged", [{"$tensor": ["eval", [1], ""]}, {"$pickle": "x"}, {"$array": ["O", [1], ""]}, {"$bytes": 7}])
def test_what_was_not_encoded_here_is_refused(damaged: Any):
    with pytest.raises(ValueError):
        decode(damaged)


def test_random_numbers_go_on_where_they_were():
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(3).tolist()]

    random.gauss(0, 1)  # of which two are drawn at a time
    saved = json.dumps(encode(randomness.capture()))
    expected = draw()
    draw()
    randomness.restore(decode(json.loads(saved)))
    assert draw() == expected


def test_random_numbers_of_all_gpus_are_kept_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch):
    """A rank that never calls set_device draws on a GPU that is not the current one."""
    states = [torch.full((16,), number, dtype=torch.uint8) for number in range(3)]
    put: list[tuple[int, int | None]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: put.append((int(state[0]), device)))
    saved = there_and_back(randomness.capture())
    randomness.restore(saved)
    assert put == [(0, 0), (1, 1)], "as many as there are now"
    for theirs in (states[2], torch.stack(states[2:])):  # of an older version; of a rank that saw no other
        put.clear()
        randomness.restore({**saved, "cuda": theirs})
        assert put == [(2, None)]


def test_generators_of_a_script_go_on_too():
    ours, theirs, older, plain = torch.Generator(), np.random.default_rng(3), np.random.RandomState(3), random.Random(3)

    def draw() -> list[Any]:
        drawn = [torch.rand(2, generator=ours).tolist(), theirs.random(), older.standard_normal(), plain.gauss(0, 1)]
        return [*drawn, plain.random()]

    draw()
    saved = [there_and_back(randomness.generator_state(each)) for each in (ours, theirs, older, plain)]
    expected = draw()
    for each, state in zip((ours, theirs, older, plain), saved, strict=True):
        randomness.set_generator(each, state)
    assert draw() == expected
    assert randomness.generator_state(random.SystemRandom()) is None


def test_a_tensor_comes_back_where_it_was():
    restoring = Restoring({}, [])
    assert restoring.restored(torch.zeros(3, device="meta"), torch.ones(3)).device.type == "meta"
    assert restoring.restored(torch.zeros(3, device="meta"), torch.ones(2)).device.type == "meta"
    assert restoring.restored(torch.zeros(3), torch.ones(3)).tolist() == [1.0] * 3


class Assigning:
    """Its state is what it was given."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_that_were_on_a_gpu_come_back_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch):
    """Also where nothing is in their place yet, as in a list of losses that grows."""
    lying: dict[int, torch.Tensor] = {}  # on a GPU, as they say
    where = torch.Tensor.device
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda each: gpu if id(each) in lying else where.__get__(each)))

    def on_gpu() -> torch.Tensor:
        made = torch.rand(2)
        lying[id(made)] = made
        return made

    def attempt() -> tuple[Documents, dict[str, Any], torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2)
        modules = [ModelTensors(model)]
        model.to("meta")  # in the place of another GPU
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        extra: dict[str, Any] = {"losses": [], "object": Assigning()}
        position = Position(None)
        return (
            Documents(modules=modules, all_optimizers=[optimizer], schedulers=[extra["object"]], extra=extra, position=position),
            extra,
            optimizer,
        )

    documents, extra, optimizer = attempt()
    extra["losses"] += [on_gpu(), torch.zeros(2)]
    extra["best"] = {3: (on_gpu(), torch.zeros(2))}
    extra["object"].state = {"sums": on_gpu(), "counts": torch.zeros(2)}
    optimizer.state["means"] = [on_gpu(), torch.zeros(2)]
    optimizer.state[optimizer.param_groups[0]["params"][1]]["directions"] = [on_gpu(), torch.zeros(2)]
    document = documents.capture()
    documents.set_capacity(capacity(len(document)))
    row = documents.local_shard(document, 0, 1).data
    documents, extra, optimizer = attempt()
    documents.restore(row, 1, same=True)
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    found = [extra["losses"], extra["best"][3], [*extra["object"].state.values()], optimizer.state["means"], state["directions"]]
    assert [[each.device.type for each in pair] for pair in found] == [["meta", "cpu"]] * len(found)
