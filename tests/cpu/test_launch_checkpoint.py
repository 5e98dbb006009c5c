"""A checkpoint that is not whole is found out, and passed over (field rows 129 and 130)."""

import json
import logging

import pytest
import torch
import torch.distributed as dist

from launch import checkpoint, manifest, selftest


@pytest.fixture(autouse=True)
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(folder, step: int) -> None:
    (folder / "deeper").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 64)
    (folder / "deeper" / "states").write_bytes(b"\0" * 1000)
    manifest.write(folder, step)


def flip_a_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": (lambda f: flip_a_bit(f / "weights"), "weights was changed"),
    "a truncated file": (lambda f: (f / "weights").write_bytes(b"short"), "weights has 5 bytes, 16384 were written"),
    "a missing file": (lambda f: (f / "deeper" / "states").unlink(), "deeper/states is missing"),
    "no manifest": (lambda f: (f / manifest.MANIFEST).unlink(), "manifest.json is not readable"),
    "half a manifest": (lambda f: (f / manifest.MANIFEST).write_text('{"step": 3, '), "manifest.json is not readable"),
    "another manifest": (lambda f: (f / manifest.MANIFEST).write_text("[]"), "manifest.json is not readable"),
}


def test_a_whole_checkpoint_has_no_fault(tmp_path):
    write(tmp_path / "c", 3)
    assert manifest.fault(tmp_path / "c") is None
    listed = json.loads((tmp_path / "c" / manifest.MANIFEST).read_text())
    assert listed["step"] == 3
    assert sorted(listed["files"]) == ["deeper/states", "weights"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(tmp_path, kind):
    damage, said = DAMAGE[kind]
    write(tmp_path / "c", 3)
    damage(tmp_path / "c")
    assert said in manifest.fault(tmp_path / "c")


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_whole_one_is_taken_with_a_warning(tmp_path, caplog, kind):
    for step in (5, 10, 200):
        write(tmp_path / f"step_{step:08d}", step)
    (tmp_path / ".partial-step_00000300").mkdir()
    DAMAGE[kind][0](tmp_path / "step_00000200")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_whole(tmp_path).name == "step_00000010"
    # Out of the way: a later save would count it among the newest, and remove the whole one.
    assert [folder.name for folder in checkpoint.found(tmp_path)] == ["step_00000010", "step_00000005"]
    assert "step_00000200 is damaged and passed over" in caplog.text


def test_all_damaged_is_an_error_and_no_fresh_start(tmp_path):
    for step in (5, 10):
        write(tmp_path / f"step_{step:08d}", step)
        flip_a_bit(tmp_path / f"step_{step:08d}" / "weights")
    with pytest.raises(checkpoint.CheckpointError, match="none of the 2 checkpoints"):
        checkpoint.newest_whole(tmp_path)


def test_none_at_all(tmp_path):
    assert checkpoint.newest_whole(tmp_path / "nowhere") is None


def test_numbers_are_compared_as_numbers(tmp_path):
    for name in ("step_9", "step_10", "step_x", "other"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step_10", "step_9"]


SAVED = {"m": torch.ones(4), "v": [torch.zeros(2)], "step": 7, "group": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("loaded", "key"),
    [
        ({**SAVED, "m": torch.ones(4).double()}, "state.m"),
        ({**SAVED, "m": torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])}, "state.m"),
        ({**SAVED, "v": []}, "state.v: another length"),
        ({**SAVED, "v": [torch.full((2,), torch.nan)]}, "state.v.0"),
        ({**SAVED, "step": 8}, "state.step"),
        ({k: v for k, v in SAVED.items() if k != "m"}, "state: keys are missing"),
        ({**SAVED, "group": {}}, "state.group: keys are missing"),
    ],
)
def test_the_self_test_sees_what_is_not_read_back(loaded, key):
    """Moments that are lost, change dtype or are left uninitialised; a step count that is dropped."""
    assert selftest.differences(SAVED, SAVED) == []
    assert selftest.differences(SAVED, loaded) == [key]


def test_a_save_neither_removes_itself_nor_is_passed_by_a_run_left_behind(tmp_path):
    for step in (1000, 2000):
        write(tmp_path / f"step_{step:08d}", step)
    write(tmp_path / ".partial", 5)
    checkpoint._put_in_place(tmp_path / ".partial", tmp_path / "step_00000005", keep=2)
    assert [folder.name for folder in checkpoint.found(tmp_path)] == ["step_00000005"]
    assert checkpoint.newest_whole(tmp_path).name == "step_00000005"
    assert (tmp_path / "replaced-step_00002000").is_dir()
