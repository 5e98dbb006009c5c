"""Rules under Megatron: its own --optimizer, and FORGE's chosen beside it, on two tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from megatron_harness import Case, Run, Workers, gap, load, owned_state, save, train_both

from tests.cpu import oracles

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

# Gate MG's bound for fp32 over the first 20 steps.
LOSS = 2e-6

OWN = {
    "adam, L2": Case(optimizer={"decoupled_weight_decay": False}, sequence_parallel=True),
    "adam, L2, in backward": Case(optimizer={"decoupled_weight_decay": False}, clip=0.0),
    "sgd": Case(optimizer={"optimizer": "sgd", "sgd_momentum": 0.8}),
    "sgd, in backward": Case(optimizer={"optimizer": "sgd", "sgd_momentum": 0.8}, clip=0.0),
    "sgd without momentum": Case(optimizer={"optimizer": "sgd", "sgd_momentum": 0.0}, clip=0.0),
}
OPTIMIZERS = {**oracles.OPTIMIZERS, "momentum": torch.optim.SGD}
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@workers
def _own() -> dict:
    owned = set(owned_state(Run(OWN["sgd"].with_forge())))
    return {name: (*train_both(case), owned) for name, case in OWN.items()}


def test_megatrons_own_optimizers(results):
    for found in results["_own"]:
        for name, (theirs, ours, owned) in found.items():
            assert gap(theirs["losses"], ours["losses"]) <= LOSS, name
            assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5), name
            for weight in owned:
                value = theirs["weights"][weight]
                torch.testing.assert_close(ours["weights"][weight], value, rtol=0, atol=5e-6, msg=f"{name}: {weight}")


def form_options(form: str) -> dict:
    return {"rule": form.partition("-")[0], "hyperparameters": oracles.FORMS[form]}


class Beside:
    """Megatron's own optimizer, with some of its weights stepped by an optimizer of their own."""

    def __init__(self, session: Run, form: str, names: set[str]):
        optimizer = session.optimizer.chained_optimizers[0].optimizer
        named = {name: p for name, p in session.model.named_parameters() if name in names}
        assert set(named) == names
        owned = {id(p) for p in named.values()}
        self.groups = optimizer.param_groups
        self.optimizers = {}
        name = form.partition("-")[0]
        given = dict(oracles.FORMS[form])
        if name in ("sgd", "momentum"):
            given["momentum"] = 0.9  # --sgd-momentum
        for index, group in enumerate(self.groups):
            members = [p for p in group["params"] if id(p) in owned]
            if members:
                self.optimizers[index] = OPTIMIZERS[name](members, lr=1.0, foreach=False, **given)
        self.theirs, optimizer.step = optimizer.step, self.step

    def step(self):
        for index, optimizer in self.optimizers.items():
            (own,) = optimizer.param_groups
            own.update(lr=self.groups[index]["lr"], weight_decay=self.groups[index]["weight_decay"])
            optimizer.step()
            for p in own["params"]:
                p.grad = None
        self.theirs()


@workers
def _chosen() -> dict:
    found = {}
    for form in oracles.FORMS:
        # Where nothing waits and where clipping does; by turns, for the time that it takes.
        case = Case(steps=3, lr=1e-3, clip=0.0 if len(found) % 2 else 0.5)
        ours = Run(case.with_forge(**form_options(form)))
        theirs = Run(case)
        Beside(theirs, form, set(owned_state(ours)))
        found[form] = theirs.train(), ours.train(), {key for state in owned_state(ours).values() for key in state}
    return found


@pytest.mark.parametrize("form", oracles.FORMS)
def test_a_chosen_rule_steps_the_owned_weights(form, results):
    for found in results["_chosen"]:
        theirs, ours, states = found[form]
        assert gap(theirs["losses"], ours["losses"]) <= LOSS
        for weight, value in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][weight], value, rtol=0, atol=5e-6, msg=weight)
        wanted = set(oracles.oracle(form, lr=1.0).states) if form != "sgd" else {"momentum_buffer"}
        assert states - {"step", "mu_product"} == wanted


@workers
def _resumed() -> dict:
    import tempfile

    found = {}
    for form in ("nadam", "rmsprop-both", "lion", "sgd"):
        case = Case(lr=1e-3, clip=0.0).with_forge(**form_options(form))
        folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
        torch.distributed.broadcast_object_list(folder)
        straight = Run(case)
        straight.train(2)
        save(straight, folder[0])
        saved = owned_state(straight)
        resumed = Run(case)
        load(resumed, folder[0])
        found[form] = saved, owned_state(resumed), straight.train(2), resumed.train(2)
        other = Run(Case(lr=1e-3, clip=0.0).with_forge())
        try:
            other.optimizer.load_state_dict(straight.optimizer.state_dict())
        except ValueError as error:
            found[form] += (str(error),)
    return found


def test_a_chosen_rule_resumes_bit_exactly_and_only_as_itself(results):
    for found in results["_resumed"]:
        for form, (saved, restored, straight, resumed, refusal) in found.items():
            for name, state in saved.items():
                for key, value in state.items():
                    assert torch.equal(value, restored[name][key]), (form, name, key)
            for name, value in straight["weights"].items():
                assert torch.equal(value, resumed["weights"][name]), (form, name)
            rule = form.partition("-")[0]
            assert f"written by rule '{rule}', not 'adamw'" in refusal


def test_options_on_the_command_line():
    from argparse import ArgumentParser

    from forge_megatron.megatron.arguments import add_forge_args, options_from_args

    parser = add_forge_args(ArgumentParser())
    options = options_from_args(
        parser.parse_args(["--forge-rule", "lion", "--forge-rule-options", "betas=(0.95,0.98)", "maximize=True"])
    )
    assert options.rule == "lion"
    assert options.hyperparameters == {"betas": (0.95, 0.98), "maximize": True}
    assert options_from_args(parser.parse_args([])).rule is None
    for wrong in ("betas", "betas=", "momentum=high"):
        with pytest.raises(ValueError, match=f"--forge-rule-options '{wrong}': give name=value"):
            options_from_args(parser.parse_args(["--forge-rule-options", wrong]))
