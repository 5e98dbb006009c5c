"""``forge.tune``: on copies, by candidates that change no bit, kept on disk. Kernels are interpreted, times made up."""

import copy
import json
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.kernels import candidates, fused, tuned, tuning, tuning_files
from forge_megatron.kernels.hopper_config import CONFIGS, choose_config
from forge_megatron.kernels.slot import Slot
from forge_megatron.rules import get

TOKENS = 24


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """An empty table, one draw, no launch twice, and two tiles beside the untuned one."""
    monkeypatch.setattr(tuning, "COORDINATES", 1)
    monkeypatch.setattr(tuning, "BEYOND_L2", 1)
    monkeypatch.setitem(candidates.TILES, "middle", candidates.TILES["middle"][3:5])
    yield
    tuned.clear()


class Timer:
    """Each candidate takes ``ratio`` of the time of the one before it; it is launched too."""

    def __init__(self, ratio=0.9):
        self.ratio = ratio
        self.known = {}

    def __call__(self, launches, device):
        if launches[0] not in self.known:
            launches[0]()
            self.known[launches[0]] = 100.0 * self.ratio ** len(self.known)
        return self.known[launches[0]]


class Untimed:
    def __call__(self, launches, device):
        raise AssertionError("it was on disk")


def model(features=48, outputs=32, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, outputs, bias=False), nn.Linear(outputs, features)).to(dtype)


def attached(**options):
    net = model()
    return net, forge.attach(net, **{"lr": 0.1, "backend": "triton", **options})


def alone(**options):
    net = nn.Linear(48, 32, bias=False).bfloat16()
    return net, forge.attach(net, lr=0.1, backend="triton", **options)


def step(net, optimizer, number=0):
    x = torch.randn(TOKENS, 48, generator=torch.Generator().manual_seed(number)).bfloat16()
    net(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(net, optimizer):
    states = [state for p in net.parameters() for state in optimizer.state[p].values()]
    return [*net.parameters(), *states]


def bits(net, optimizer):
    return [tensor.detach().clone().view(-1).view(torch.uint8) for tensor in tensors(net, optimizer)]


def launched(monkeypatch):
    """What every launch from now on was chosen to be."""
    seen = []
    launch = fused.launch_of

    def spying(chosen, *operands):
        seen.append(str(chosen))
        return launch(chosen, *operands)

    monkeypatch.setattr(fused, "launch_of", spying)
    return seen


@pytest.mark.parametrize("recipe", [None, "int8", "sr-store", "fp8-weight"])
def test_a_tuned_step_takes_the_fastest_candidate_and_leaves_the_bits_of_an_untuned_one(tmp_path, monkeypatch, recipe):
    twins = [attached(recipe=recipe) for _ in range(2)]
    for net, optimizer in twins:
        step(net, optimizer)
    found = forge.tune(twins[1][1], [TOKENS], folder=tmp_path, timer=Timer())
    assert len(found.outcomes) == 2
    for outcome in found.outcomes.values():
        fastest = list(outcome.us)[-1]
        assert str(outcome.chosen) == fastest != str(outcome.default)
        assert len(outcome.us) + len(outcome.left_out) == 3 - (recipe in ("int8", "fp8-weight"))
    seen = launched(monkeypatch)
    step(*twins[1], 1)
    assert set(seen) == {str(outcome.chosen) for outcome in found.outcomes.values()}
    tuned.clear()
    step(*twins[0], 1)
    assert set(seen[2:]) == {"triton"}
    assert all(torch.equal(a, b) for a, b in zip(bits(*twins[0]), bits(*twins[1]), strict=True))
    kernels = {row.name: row.kernel for row in twins[1][1].coverage}
    assert kernels["0.weight"] == f"{seen[0]} (tuned) at {TOKENS} tokens"
    assert kernels["1.bias"] == ""
    assert {row.kernel for row in twins[0][1].coverage if row.fused} == {f"triton at {TOKENS} tokens"}


def test_steps_of_another_kind_are_chosen_as_before(tmp_path, monkeypatch):
    net, optimizer = attached()
    found = forge.tune(optimizer, [TOKENS + 8], folder=tmp_path, timer=Timer())
    seen = launched(monkeypatch)
    step(net, optimizer)
    assert seen == ["triton", "triton"]
    described = next(iter(optimizer.coverage)).kernel
    (tuned_for_first,) = (str(each.chosen) for cell, each in found.outcomes.items() if cell.shape == (32, 48))
    assert described == f"triton at {TOKENS} tokens; {tuned_for_first} (tuned) at {TOKENS + 8} tokens"
    slot = optimizer.owned[net[0].weight].slot
    dy, x = (torch.zeros(TOKENS + 8, extent, dtype=torch.bfloat16) for extent in (32, 48))
    wide = torch.zeros(TOKENS + 8, 64, dtype=torch.bfloat16)[:, :48]
    assert str(tuned.lookup(slot, [(dy, x)], None, "triton")) == tuned_for_first
    for segments, accumulator, backend in (
        ([(dy, x)] * 2, None, "triton"),
        ([(dy, wide)], None, "triton"),
        ([(dy.float(), x.float())], None, "triton"),
        ([(dy, x)], torch.zeros(32, 48), "triton"),
        ([(dy, x)], None, "auto"),
    ):
        assert tuned.lookup(slot, segments, accumulator, backend) is None


def test_a_candidate_with_other_bits_is_dropped_however_fast(tmp_path, monkeypatch):
    _, optimizer = alone()
    launch, wrong = fused.launch_of, str(candidates.Candidate("triton", None, "128x64x64 g8 p4 w4 s4"))

    def off_by_one_bit(chosen, *operands):
        right = launch(chosen, *operands)
        if str(chosen) != wrong:
            return right

        def flipping(slot, *others):
            right(slot, *others)
            slot.states[1].view(torch.int16)[-1, -1] ^= 1

        return flipping

    monkeypatch.setattr(fused, "launch_of", off_by_one_bit)
    found = forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Timer())
    for outcome in found.outcomes.values():
        assert outcome.left_out == {wrong: "other bits"}
        assert wrong not in outcome.us
        assert str(outcome.chosen) == "triton 128x128x32 g8 p8 w8 s5"
    assert f"not {wrong}: other bits" in str(found)


def test_a_candidate_that_is_hardly_faster_is_not_taken(tmp_path):
    _, optimizer = alone()
    found = forge.tune(
        optimizer, [TOKENS], folder=tmp_path, timer=lambda launches, device: 100 - 0.1 * id(launches) % 1
    )
    assert all(outcome.chosen == outcome.default for outcome in found.outcomes.values())


def test_weights_states_generators_and_memory_are_as_before(tmp_path, monkeypatch):
    net, optimizer = alone(recipe="sr-store")
    step(net, optimizer)
    before, versions = bits(net, optimizer), [tensor._version for tensor in tensors(net, optimizer)]
    generator, copies = torch.get_rng_state(), []
    copied = tuning._copy

    def remembered(slot):
        own = copied(slot)
        copies.extend(map(weakref.ref, tuning._written(own)))
        return own

    monkeypatch.setattr(tuning, "_copy", remembered)
    forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Timer())
    assert all(torch.equal(a, b) for a, b in zip(before, bits(net, optimizer), strict=True))
    assert versions == [tensor._version for tensor in tensors(net, optimizer)]
    assert torch.equal(generator, torch.get_rng_state())
    assert copies
    assert all(reference() is None for reference in copies)


def test_what_was_found_is_read_again_until_a_kernel_changes(tmp_path, monkeypatch):
    _, optimizer = alone()
    found = forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Timer())
    tuned.clear()
    again = forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Untimed())
    assert again.outcomes == found.outcomes
    assert (found.measured, again.measured) == (found.outcomes.keys(), frozenset())
    more = forge.tune(optimizer, [TOKENS, 8], folder=tmp_path, timer=Timer())
    assert {cell.tokens for cell in more.measured} == {8}
    assert len(list(tmp_path.iterdir())) == 2
    for changed in (
        lambda: monkeypatch.setattr(tuning_files, "source_hash", lambda: "another"),
        lambda: monkeypatch.setattr(torch, "__version__", "9.9"),
        lambda: monkeypatch.setattr(tuning_files, "_triton", lambda: "9.9"),
        lambda: monkeypatch.setattr(tuned, "_name_of", lambda device: "another device"),
    ):
        changed()
        assert forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Timer()).measured


def _truncate(path):
    path.write_text(path.read_text()[:40])


def _of_another(path):
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "key": {**kept["key"], "device": "another"}}))


def _of_no_candidate(path):
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "chosen": "triton 1x1x1"}))


def _binary(path):
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    "damage", [_truncate, _of_another, _of_no_candidate, _binary, lambda path: path.write_text("[]")]
)
def test_a_file_that_is_not_ours_is_named_ignored_and_written_anew(tmp_path, damage):
    _, optimizer = alone()
    found = forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Timer())
    (path,) = tmp_path.iterdir()
    damage(path)
    with pytest.warns(UserWarning, match=f"{path}: .* ignored, and tuned anew"):
        again = forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Timer())
    assert again.measured == again.outcomes.keys() == found.outcomes.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forge.tune(optimizer, [TOKENS], folder=tmp_path, timer=Untimed())


def test_a_folder_that_cannot_be_written_is_named_and_the_choice_taken(tmp_path):
    _, optimizer = alone()
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="file.*(not readable|not kept)") as warned:
        found = forge.tune(optimizer, [TOKENS], folder=tmp_path / "file", timer=Timer())
    assert "not kept" in str(warned.list[-1].message)
    assert all(tuned._table[cell] == outcome.chosen for cell, outcome in found.outcomes.items())


def test_the_users_cache_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forge.tune(alone()[1], [TOKENS], timer=Timer())
    assert len(list((tmp_path / "forge_megatron" / "tuning").glob("*.json"))) == 1


def test_tuning_in_a_step_is_refused(tmp_path):
    net, optimizer = attached()
    errors = []

    def inside(gradient):
        with pytest.raises(RuntimeError, match=r"tune\(\) inside backward") as error:
            forge.tune(optimizer, [TOKENS], folder=tmp_path)
        errors.append(error)

    y = net(torch.randn(TOKENS, 48).bfloat16())
    y.register_hook(inside)
    y.float().sum().backward()
    assert errors
    with pytest.raises(RuntimeError, match=r"0\.weight: a backward is pending; call step\(\) before you tune"):
        forge.tune(optimizer, [TOKENS], folder=tmp_path)
    optimizer.step()
    for tokens in ([], [0], [1.5]):
        with pytest.raises(ValueError, match="give the numbers of tokens"):
            forge.tune(optimizer, tokens)
    optimizer._graphs = object()
    with pytest.raises(RuntimeError, match=r"tune\(\) after capture\(\)"):
        forge.tune(optimizer, [TOKENS], folder=tmp_path)


def test_what_has_nothing_to_tune_is_said_by_name(tmp_path):
    net = nn.Sequential(nn.Embedding(16, 48), *model())
    for options, name, reason in (
        ({"backend": "triton"}, "0.weight", "an embedding is stepped by token id"),
        ({}, "1.weight", "cpu runs the reference, which has no configurations"),
        ({"rule": "muon", "backend": "triton", "adamw": {"lr": 0.1}}, "1.weight", "muon steps in stages"),
    ):
        own = copy.deepcopy(net)
        own[2].weight.requires_grad_(False)
        found = forge.tune(forge.attach(own, lr=0.1, **options), [TOKENS], folder=tmp_path, timer=Timer())
        assert found.not_tuned[name] == reason
        assert found.not_tuned.get("2.weight", "it is frozen") == "it is frozen"
        assert f"{name}: not tuned: {reason}" in str(found)
        assert len(found.outcomes) == (reason.startswith("an embedding"))


def test_the_trainer_tunes_for_the_tokens_of_a_micro_batch(monkeypatch):
    pytest.importorskip("megatron.core", reason="NOT RUN: the trainer needs megatron-core")
    from launch import config, optim

    asked = []
    tune = forge.tune

    def asking(optimizers, tokens):
        asked.append((optimizers, tokens))
        return tune(optimizers, tokens)

    monkeypatch.setattr(forge, "tune", asking)
    optimizer = forge.attach(model(), lr=0.1)
    pairs = SimpleNamespace(chained_optimizers=[SimpleNamespace(forge=optimizer), SimpleNamespace()])
    recipe = config.Recipe(
        data=config.Data(sequence_length=64), batch=config.Batch(micro=3), parallel=config.Parallel(context=2, tensor=2)
    )
    said = optim.tune(recipe, pairs)
    assert asked == [([optimizer], [96])]
    assert said == "tuned 0 kinds of launch (0 measured now, 0 changed); 2 weights as untuned"


def test_hopper_candidates_are_every_configuration_in_two_groups_the_untuned_one_first():
    weight = torch.zeros(256, 512, dtype=torch.bfloat16)
    states = torch.zeros_like(weight), torch.zeros_like(weight)
    slot = Slot(get("adamw"), weight, states, torch.zeros(8))
    segments = [(torch.zeros(64, 256, dtype=torch.bfloat16), torch.zeros(64, 512, dtype=torch.bfloat16))]
    found = list(dict.fromkeys(candidates._of_kernel("hopper", slot, segments)))
    first = choose_config(256, 512, 64)
    assert found[0].configuration == CONFIGS[first]
    assert {str(each) for each in found} == {f"hopper {name} g{group}" for name in CONFIGS for group in (4, 8)}
