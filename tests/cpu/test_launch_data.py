"""Where each sample goes, and what data preparation writes."""

import hashlib
import json
from collections import Counter
from itertools import chain
from math import log2

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from launch import config, prepare
from launch.data import StepSampler
from launch.tokenizer import ByteTokenizer


def recipe(micro=2, total=8, data=1, reorder=False) -> config.Recipe:
    return config.Recipe(
        batch=config.Batch(micro=micro, total=total),
        parallel=config.Parallel(data=data),
        run=config.Run(reorder=reorder),
    )


def steps(recipe, length, first, last, rank=0) -> list[list[int]]:
    return list(StepSampler(recipe, length, first, last, rank))


def test_a_step_reads_consecutive_samples():
    assert steps(recipe(), 100, 0, 2) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]


def test_a_later_start_goes_on_where_the_earlier_part_ended():
    assert steps(recipe(), 100, 0, 3) + steps(recipe(), 100, 3, 7) == steps(recipe(), 100, 0, 7)


def test_past_the_end_it_begins_again():
    assert steps(recipe(), 10, 1, 2) == [[8, 9], [0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_ranks_share_a_step_without_overlap(ranks):
    shared = [steps(recipe(micro=1, data=ranks), 100, 2, 4, rank) for rank in range(ranks)]
    assert all(len(own) == len(StepSampler(recipe(micro=1, data=ranks), 100, 2, 4, 0)) for own in shared)
    read = Counter(sample for own in shared for batch in own for sample in batch)
    assert read == Counter(range(16, 32))


def test_reordering_keeps_each_steps_samples():
    plain, reordered = (steps(recipe(reorder=r), 100, 0, 3) for r in (False, True))
    assert reordered != plain
    for step in range(3):
        mine, theirs = (sorted(chain.from_iterable(s[4 * step : 4 * step + 4])) for s in (plain, reordered))
        assert mine == theirs


TEXTS = {f"{name}.py": f"# {name}\n" * (i + 1) for i, name in enumerate("abcdefgh")}


@pytest.fixture
def files(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return [tmp_path / name for name in TEXTS]


def documents(prefix) -> list[bytes]:
    dataset = IndexedDataset(str(prefix))
    tokens = [dataset[i] for i in range(len(dataset))]
    assert all(document[-1] == ByteTokenizer.eod for document in tokens)
    return [document[:-1].astype(numpy.uint8).tobytes() for document in tokens]


def test_every_file_is_one_document_and_every_fourth_is_held_out(files, tmp_path):
    prepare.prepare(files, tmp_path / "out", valid_every=4)
    texts = [text.encode() for text in TEXTS.values()]
    assert documents(tmp_path / "out" / "valid") == [texts[3], texts[7]]
    assert documents(tmp_path / "out" / "train") == [t for i, t in enumerate(texts) if i not in (3, 7)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "data.json", "train.bin", "train.idx", "valid.bin", "valid.idx",
    ]  # fmt: skip


def test_the_description(files, tmp_path):
    returned = prepare.prepare(files, tmp_path / "out", valid_every=4)
    written = json.loads((tmp_path / "out" / "data.json").read_text())
    assert returned == written
    held_out = (TEXTS["d.py"] + TEXTS["h.py"]).encode()
    frequencies = [n / len(held_out) for n in Counter(held_out).values()]
    assert written["valid_unigram_bits_per_byte"] == pytest.approx(-sum(p * log2(p) for p in frequencies), rel=1e-12)
    assert written["splits"]["valid"] == {"documents": 2, "tokens": len(held_out) + 2}
    content = b"".join((tmp_path / "out" / f"{split}.bin").read_bytes() for split in ("train", "valid"))
    assert written["sha256"] == hashlib.sha256(content).hexdigest()


def test_it_is_deterministic(files, tmp_path):
    first = prepare.prepare(files, tmp_path / "one", valid_every=4)
    assert prepare.prepare(files, tmp_path / "two", valid_every=4) == first


@pytest.mark.parametrize("every", [0, 1, 9])
def test_an_empty_split_is_refused(files, tmp_path, every):
    with pytest.raises(ValueError, match="--valid-every"):
        prepare.prepare(files, tmp_path / "out", valid_every=every)
    assert not (tmp_path / "out").exists()


def test_the_standard_library_is_there_and_in_order():
    files = prepare.stdlib_sources()
    assert len(files) > 300
    assert files == sorted(files, key=str)
    assert not [p for p in files if "site-packages" in p.parts or "test" in p.parts]


def test_entropy_by_hand():
    assert prepare.entropy_bits(Counter("abcd")) == 2.0
    assert prepare.entropy_bits(Counter("aaaa")) == 0.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "nowhere.txt", "elsewhere.txt", "--valid-every", "2"], "nowhere.txt"),
        (["--text", __file__], "--valid-every=20 with 1 files"),
        (["--text", __file__, __file__, "--valid-every", "2", "--tokenizer", "no/such-folder"], "no/such-folder"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ended:
        prepare.main([*arguments, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
