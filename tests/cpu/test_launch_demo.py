"""The demo's verdicts can fail: each one, alone."""

import json
from dataclasses import replace

import pytest

from launch import demo

UNIGRAM = 4.8


def arm(**changes) -> demo.Arm:
    losses = {step: 6.0 - step / 50 for step in range(1, 101)}
    plain = demo.Arm(losses, bits_per_byte=3.2, gradient_bytes=100, weights=[1.5, 2.5], step_seconds=0.1)
    return replace(plain, **changes)


def shifted(by: float, steps) -> dict[int, float]:
    return {step: loss + (by if step in steps else 0.0) for step, loss in arm().losses.items()}


def failing(**arms: demo.Arm) -> list[str]:
    """The verdicts that fail; the reordered run drifts by 1e-5 after step 20."""
    plain = {
        "forge": arm(losses=shifted(1e-6, range(5, 90)), gradient_bytes=10),
        "standard": arm(),
        "reordered": arm(losses=shifted(1e-5, range(21, 90))),
    }
    return [text for passed, text in demo.verdicts({**plain, **arms}, UNIGRAM) if not passed]


def test_a_good_run_passes():
    assert failing() == []


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (arm(gradient_bytes=10, weights=[1.5, 2.6]), "same weights"),
        (arm(gradient_bytes=10, losses=shifted(3e-6, [20])), "first 20 steps"),
        (arm(gradient_bytes=10, losses=shifted(2e-5, [60])), "afterwards"),
        (arm(gradient_bytes=10, bits_per_byte=4.0), "bits a byte"),
        (arm(gradient_bytes=100), "gradient kept"),
    ],
)
def test_each_verdict_fails_alone(forge, said):
    (text,) = failing(forge=forge)
    assert said in text


def test_a_loss_that_is_not_a_number_fails():
    losses = shifted(float("nan"), [50])
    assert any("afterwards" in text for text in failing(forge=arm(gradient_bytes=10, losses=losses)))


def test_an_arm_is_read_from_its_records(tmp_path):
    records = [
        {"record": "start", "step": 0, "weights": [1.0, 2.0]},
        {"record": "step", "step": 1, "loss": 9.0, "seconds": 1.0},
        {"record": "step", "step": 1, "loss": 5.0, "seconds": 0.2},
        {"record": "step", "step": 2, "loss": 4.0, "seconds": 0.3},
        {"record": "valid", "step": 2, "valid_loss": 3.0, "bits_per_byte": 4.3},
        {"record": "end", "step": 2, "gradient_bytes": 7},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read = demo.Arm.read(tmp_path)
    assert read == demo.Arm({1: 5.0, 2: 4.0}, 4.3, 7, [1.0, 2.0], 0.3)


def test_the_plot_is_a_png(tmp_path):
    arms = {"forge": arm(), "standard": arm(), "standard, reordered": arm(losses=shifted(1e-5, range(21, 90)))}
    demo.plot(tmp_path / "curves.png", arms, UNIGRAM)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
