"""Forms of the model on a GPU, by whatever kernels it has for them: losses are those of a CPU in fp32."""

from pathlib import Path

import pytest
from layouts import BASE, Sections, merged, name_of
from trainer_ranks import steps, trained, write_config, write_dataset

DOCUMENTS: Sections = {"data": {"mask_documents": True, "mask_end_of_text": True, "end_of_text": 3}}
FORMS: list[Sections] = [
    {"model": {"kv_heads": 2}},
    {"model": {"position": "alibi"}},
    {"model": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tie_embeddings": True}},
    {"model": {"mup_base_hidden": 16, "position": "none"}},
    {"model": {"heads": 1, "hidden": 128}},
    {"model": {"vocab_size": 5000}},
    DOCUMENTS,
    merged(DOCUMENTS, {"model": {"kv_heads": 1}}),
    merged(DOCUMENTS, {"model": {"position": "alibi"}}),
    {"train": {"recompute": "full", "recompute_every": 2}},
    {"train": {"recompute": "selective", "batch_rampup": {"start": 8, "increment": 4, "samples": 40}}},
    {"parallel": {"zero_stage": 3}, "logging": {"timers": True}},
    {"parallel": {"zero_stage": 2, "reduce_gradients": "every"}, "train": {"grad_dtype": "bf16"}},
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "walks")


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_a_form_of_the_model_trains_on_a_gpu_as_on_a_cpu(dataset: Path, tmp_path: Path, form: Sections):
    def told(name: str, sections: Sections) -> list[tuple[int, float, float, float]]:
        return steps(trained(write_config(tmp_path / name, dataset, **merged(BASE, form, sections)), 1))

    expected = told("cpu", {})
    auto: Sections = {"cluster": {"device": "cuda"}, "model": {"attention": "auto"}}
    exact = told("fp32", merged(auto, {"train": {"precision": "fp32"}}))
    fast = told("bf16", merged(auto, {"train": {"precision": "bf16", "compile": "auto"}}))
    assert exact == [pytest.approx(line, rel=1e-3) for line in expected]
    assert fast == [pytest.approx(line, rel=6e-2) for line in expected]
