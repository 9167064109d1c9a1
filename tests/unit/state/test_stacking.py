"""Which parameters are stacked to one array."""

from resilient.state.stacking import places

W = ((4, 4), "torch.float32")
V = ((4,), "torch.float32")


def test_layers_that_are_alike_are_one_array_in_the_order_of_their_numbers():
    found = places({f"model/layers.{number}.weight": W for number in (10, 2, 1)})
    assert found == {
        "model/layers.1.weight": ("model/layers.weight", (0, 3)),
        "model/layers.2.weight": ("model/layers.weight", (1, 3)),
        "model/layers.10.weight": ("model/layers.weight", (2, 3)),
    }


def test_what_is_not_alike_or_alone_or_has_the_name_of_another_stays():
    kinds = {"m/a.0.w": W, "m/a.1.w": V, "m/b.0.w": W, "m/c.0.w": W, "m/c.1.w": W, "m/c.w": W, "m/0": V, "m/1": V, "m/x": V}
    assert places(kinds) == {name: (name, None) for name in kinds}


def test_only_the_outermost_number_is_stacked():
    kinds = {f"m/layers.{layer}.experts.{expert}": W for layer in range(2) for expert in range(2)}
    assert places(kinds)["m/layers.1.experts.0"] == ("m/layers.experts.0", (1, 2))
