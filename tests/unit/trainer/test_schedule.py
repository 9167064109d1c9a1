"""The learning rate over the samples."""

import math

import pytest

from resilient.worker import Config
from trainer.schedule import for_config, learning_rate

ARGS = {"peak": 1.0, "floor": 0.1, "warmup": 100, "decay": 1100}

TABLE = [
    (0, 0.0),
    (50, 0.5),
    (99, 0.99),
    (100, 1.0),
    (600, 0.55),  # half-way between peak and floor
    (350, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))),
    (1100, 0.1),
    (5000, 0.1),
]


@pytest.mark.parametrize(("samples", "rate"), TABLE)
def test_it_warms_up_falls_as_a_cosine_and_stays_at_the_floor(samples, rate):
    assert learning_rate(samples, **ARGS) == pytest.approx(rate)


def test_it_never_rises_after_the_warm_up():
    rates = [learning_rate(samples, **ARGS) for samples in range(100, 1300)]
    assert rates == sorted(rates, reverse=True)


def test_constant_stays_at_the_peak():
    assert learning_rate(10**9, **ARGS, kind="constant") == 1.0
    assert learning_rate(50, **ARGS, kind="constant") == 0.5


def test_without_warm_up_it_starts_at_the_peak():
    assert learning_rate(0, **{**ARGS, "warmup": 0}) == 1.0


WSD = [(50, 0.5), (100, 1.0), (700, 1.0), (770, 1.0), (935, 0.55), (1100, 0.1), (2000, 0.1)]


@pytest.mark.parametrize(("samples", "rate"), WSD)
def test_wsd_stays_at_the_peak_and_falls_in_its_last_share(samples, rate):
    assert learning_rate(samples, **ARGS, kind="wsd", wsd_fraction=0.3) == pytest.approx(rate)


@pytest.mark.parametrize(("samples", "rate"), [(50, 0.5), (100, 1.0), (600, 0.55), (1100, 0.1)])
def test_linear_falls_evenly(samples, rate):
    assert learning_rate(samples, **ARGS, kind="linear") == pytest.approx(rate)


def test_tokens_are_samples_times_the_sequence():
    base = {"model": {"seq_len": 128}, "train": {"steps": 100}}
    tokens = Config.model_validate({**base, "optimizer": {"warmup_tokens": 128 * 40, "decay_tokens": 128 * 900}})
    samples = Config.model_validate({**base, "optimizer": {"warmup_samples": 40, "decay_samples": 900}})
    assert [for_config(tokens, at) for at in range(0, 1000, 7)] == [for_config(samples, at) for at in range(0, 1000, 7)]
