"""Which attention kernel is taken: the fastest of those that run, by all ranks alike, and by a restart the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_ranks import run_ranks

from resilient.worker import Config, settle
from trainer import kernels
from trainer.attention import Core, Kernel
from trainer.device import Host, StandIn
from trainer.kernels import Trial, decide, quickest, refusal, remember, remembered, timed, work_of
from trainer.shape import GPTShape, shape_of

CPU = torch.device("cpu")
SHAPE = GPTShape(64, 1, 32, 4, 2, 64, 16)
CONFIG = Config.model_validate({"model": {"hidden": 32, "heads": 4, "kv_heads": 2, "seq_len": 16, "vocab_size": 64}})
KNOWN = (Kernel.SDPA_FLASH, Kernel.MATH)


def work(**changes: object) -> kernels.Work:
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update=changes)})
    return work_of(config, shape_of(config, 64), settle(config, 1), CPU, torch.float32)


def trial(**options: Any) -> Trial:
    return Trial(SHAPE, CPU, torch.float32, **options)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({Kernel.SDPA_CUDNN: 1.0, Kernel.SDPA_FLASH: 2.0}, Kernel.SDPA_CUDNN),
        ({Kernel.SDPA_CUDNN: 2.0, Kernel.SDPA_FLASH: 1.0}, Kernel.SDPA_FLASH),
        ({Kernel.SDPA_CUDNN: 1.01, Kernel.SDPA_FLASH: 1.0}, Kernel.SDPA_CUDNN),  # as good, and the first
        ({Kernel.SDPA_FLASH: 0.0}, Kernel.SDPA_FLASH),
        ({}, Kernel.MATH),
    ],
)
def test_the_first_kernel_that_is_as_good_as_the_fastest_is_taken(seconds: dict[Kernel, float], expected: Kernel):
    assert quickest(seconds) is expected


def test_kernels_are_timed_by_the_clock_of_their_device():
    device = StandIn()

    class Played(Trial):
        def run(self, kernel: Kernel) -> None:
            device.launch({Kernel.SDPA_FLASH: 3e-3, Kernel.MATH: 7e-3}[kernel])

    found = timed(KNOWN, Played(SHAPE, CPU, torch.float32), device)
    assert found == pytest.approx({Kernel.SDPA_FLASH: 3e-3, Kernel.MATH: 7e-3})


def test_real_kernels_are_timed_forward_and_backward_at_the_real_shape(monkeypatch: pytest.MonkeyPatch):
    seen: set[tuple[torch.Size, ...]] = set()
    whole = Core.forward

    def forward(core: Core, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, apart: object = None) -> torch.Tensor:
        seen.add((query.shape, key.shape))
        assert query.requires_grad
        return whole(core, query, key, value, apart)

    monkeypatch.setattr(Core, "forward", forward)
    found = timed(KNOWN, trial(batch=3, seq=24, heads=(2, 1), documents=True), Host())
    assert set(found) == set(KNOWN)
    assert min(found.values()) > 0
    assert seen == {((3, 2, 24, 8), (3, 1, 24, 8))}


@pytest.mark.parametrize("error", [RuntimeError, ValueError, ImportError, AssertionError, AttributeError, TypeError])
def test_whatever_a_kernel_raises_is_a_refusal(monkeypatch: pytest.MonkeyPatch, error: type[Exception]):
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise error("head dimension 256\nat some length")

    assert refusal(Kernel.SDPA_FLASH, trial()) is None
    monkeypatch.setattr(Core, "forward", broken)
    assert refusal(Kernel.SDPA_FLASH, trial()) == f"{error.__name__}: head dimension 256"
    assert refusal(Kernel.SDPA_CUDNN, trial()) == "this kernel is for CUDA"


def test_trying_kernels_draws_none_of_the_random_numbers_of_the_training():
    before = torch.get_rng_state()
    dropping = Trial(replace(SHAPE, attention_dropout=0.5), CPU, torch.float32)
    assert refusal(Kernel.MATH, dropping) is None
    timed(KNOWN[1:], dropping, Host())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_choice_is_remembered_for_the_same_work_alone(tmp_path: Path):
    place = tmp_path / "run" / "attention.json"
    assert remembered(place, work()) is None
    remember(place, work(), Kernel.SDPA_CUDNN, {Kernel.SDPA_CUDNN: 1e-3})
    assert remembered(place, work()) is Kernel.SDPA_CUDNN
    assert remembered(place, work(micro_batch_size=8)) is None
    assert json.loads(place.read_text())["seconds"] == {"sdpa_cudnn": 1e-3}
    assert [each.name for each in place.parent.iterdir()] == ["attention.json"]
    for damaged in (b"", b"{", b"[]", b'{"kernel": 3}', place.read_bytes().replace(b'"sdpa_cudnn",', b'"none",')):
        place.write_bytes(damaged)
        assert remembered(place, work()) is None


def _decided(place: Path, fastest: list[Kernel], runs: bool = True, stood_by: bool = False) -> Kernel:
    """As one rank, which measures another kernel to be the fastest than its peer."""
    import torch.distributed as dist

    dist.init_process_group("gloo")

    class Played(Trial):
        def run(self, kernel: Kernel) -> None:
            if kernel is Kernel.SDPA_FLASH and not runs:
                raise RuntimeError("No available kernel")
            device.launch(1.0 if kernel is fastest[dist.get_rank()] else 2.0)

    device = StandIn()
    if stood_by:
        kernels.ran(Kernel.SDPA_FLASH, CONFIG, shape_of(CONFIG, 64), settle(CONFIG, 1), CPU, torch.float32)
    return decide(place, work(), Played(SHAPE, CPU, torch.float32), KNOWN, device)


def test_ranks_take_the_kernel_that_rank_0_found_and_a_restart_takes_it_again(tmp_path: Path):
    place = tmp_path / "attention.json"
    assert run_ranks(2, _decided, place, [Kernel.MATH, Kernel.SDPA_FLASH]) == [Kernel.MATH] * 2
    place.unlink()
    assert run_ranks(2, _decided, place, [Kernel.SDPA_FLASH, Kernel.MATH]) == [Kernel.SDPA_FLASH] * 2
    assert run_ranks(2, _decided, place, [Kernel.MATH, Kernel.MATH]) == [Kernel.SDPA_FLASH] * 2, "kept, whatever is faster now"
    assert run_ranks(2, _decided, place, [Kernel.MATH] * 2, False, True) == [Kernel.SDPA_FLASH] * 2, "it has run: not tried again"
    assert run_ranks(2, _decided, place, [Kernel.MATH, Kernel.MATH], False) == [Kernel.MATH] * 2, "it does not run any more"


def test_a_standby_foresees_what_was_found_before_and_tries_kernels_only_where_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu, tried = torch.device("cuda", 0), list[str]()
    config = CONFIG.model_copy(update={"run_dir": tmp_path})
    monkeypatch.setattr(kernels, "work_of", lambda *_: work())
    monkeypatch.setattr(kernels, "choose", lambda wanted, *_, **__: tried.append(wanted) or Kernel.SDPA_FLASH)
    asked = (config, SHAPE, settle(config, 1), gpu, torch.bfloat16)
    assert kernels.foreseen(*asked) is Kernel.SDPA_FLASH
    assert tried == ["auto"]
    remember(tmp_path / kernels.FILE, work(), Kernel.SDPA_CUDNN, {})
    assert kernels.foreseen(*asked) is Kernel.SDPA_CUDNN
    assert tried == ["auto"], "of what was found before nothing is tried, which takes the GPU's time and memory"


@pytest.mark.parametrize(
    ("error", "level"), [(ModuleNotFoundError("No module named 'flash_attn'"), "INFO"), (RuntimeError("No kernel"), "WARNING")]
)
def test_a_package_that_is_not_there_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, level: str
):
    monkeypatch.setattr(kernels, "refusal", lambda *_: f"{type(error).__name__}: {error}")
    with caplog.at_level("INFO", "trainer.kernels"):
        assert kernels.choose("auto", SHAPE, CPU, torch.float32) is Kernel.MATH
    assert {each.levelname for each in caplog.records if "sdpa_flash" in each.message} == {level}


def test_flash_attention_3_takes_the_place_of_pytorchs_own_only_while_it_is_the_kernel(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(kernels, "activate_flash_attention_impl", told.append)
    monkeypatch.setattr(kernels, "restore_flash_attention_impl", lambda: told.append("own"))
    for kernel in (Kernel.SDPA_FLASH, Kernel.FLASH_ATTN_3, Kernel.SDPA_FLASH, Kernel.MATH):
        assert kernels.use(kernel) is kernel
    assert told == ["FA3", "own"]


@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(36, 18, (9, 9)), (32, 8, (8, 2)), (32, 1, (8, 1))])
def test_kernels_are_tried_on_the_heads_that_a_rank_of_four_has(heads: int, kv_heads: int, expected: tuple[int, int]):
    """Of 9 queries, keys of 18 go to 2, 2, 2, 2 and 1: those queries get nine of their own."""
    model = {"hidden": heads * 8, "heads": heads, "kv_heads": kv_heads, "vocab_size": 64, "seq_len": 16}
    config = Config.model_validate({"model": model, "parallel": {"tp": 4}})
    found = work_of(config, shape_of(config, 64), settle(config, 4), CPU, torch.float32)
    assert (found.heads, found.kv_heads) == expected
