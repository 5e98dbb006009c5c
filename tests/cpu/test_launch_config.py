"""A recipe is read whole or refused in one line that names the key."""

import dataclasses

import pytest

from launch import config

BASE = """
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4}
data: {sequence_length: 64, synthetic: true}
batch: {total: 8, micro: 2}
optimizer: {lr: 1e-3}
run: {dir: unused, steps: 10}
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return path


def test_file_and_overrides(recipe_file):
    recipe = config.load(str(recipe_file), ["run.steps=7", "data.train=[a, b]", "parallel.data=2", "optimizer.lr=2e-3"])
    assert (recipe.run.steps, recipe.data.train, recipe.optimizer.lr) == (7, ["a", "b"], 2e-3)
    assert recipe.model.hidden_size == 64
    assert recipe.world_size == 2
    assert recipe.micro_batches == 2


@pytest.mark.parametrize("name", sorted(path.stem for path in config.RECIPES.glob("*.yaml")))
def test_every_recipe_of_the_folder_loads_by_name(name):
    assert config.load(name).model.num_layers > 0


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("run.stepz=3", "run.stepz", "did you mean run.steps?"),
        ("optimiser.lr=1", "optimiser", "did you mean optimizer?"),
        ("model.zzz=1", "model.zzz", "known: num_layers"),
        ("run.steps=many", "run.steps", "many"),
        ("run.steps=null", "run.steps", "None"),
        ("model=3", "model", "model.num_layers"),
        ("data.train=a", "data.train", "'a' is no list: give data.train=[a]"),
        ("data.train_weights=1.0", "data.train_weights", "data.train_weights=[1.0]"),
        ("run.steps=${run.stepz}", "run.steps", "stepz"),
        ("run.steps", "run.steps", "key=value"),
        # Field log row 3: 0 is the one spelling of no clipping, with inf.
        ("optimizer.clip_grad=None", "optimizer.clip_grad", "None"),
        ("optimizer.clip_grad=null", "optimizer.clip_grad", "None"),
    ],
)
def test_a_wrong_override_names_its_key(recipe_file, override, key, said):
    with pytest.raises(config.RecipeError) as caught:
        config.load(str(recipe_file), [override])
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_in_the_file(recipe_file):
    recipe_file.write_text(BASE.replace("num_layers", "layers"))
    with pytest.raises(config.RecipeError, match=r"^model.layers: unknown key; did you mean model.num_layers"):
        config.load(str(recipe_file))


def test_a_required_key_that_is_not_given(recipe_file):
    recipe_file.write_text(BASE.replace("lr: 1e-3", ""))
    with pytest.raises(config.RecipeError, match=r"^optimizer.lr: required"):
        config.load(str(recipe_file))


def test_yaml_that_is_none(recipe_file):
    recipe_file.write_text("model: {num_layers: 2")
    with pytest.raises(config.RecipeError, match="not readable as YAML"):
        config.load(str(recipe_file))


def test_an_unknown_recipe_lists_the_known():
    with pytest.raises(config.RecipeError, match=r"^RECIPE: .*demo"):
        config.load("no-such-recipe")


def test_a_path_in_the_users_folder(recipe_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = config.load(str(recipe_file), ["run.dir=~/runs/a", "data.train=[~/text,other/~]"])
    assert recipe.run.dir == f"{tmp_path}/runs/a"
    assert recipe.data.train == [f"{tmp_path}/text", "other/~"]


def test_written_recipe_reads_back(recipe_file, tmp_path):
    recipe = config.load(str(recipe_file), ["optimizer.recipe=fp32-state", "data.train_weights=[0.25, 0.75]"])
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml(recipe))
    assert config.load(str(again)) == recipe


def test_a_key_cannot_be_changed_after_it_was_read(recipe_file):
    """Field row 112: a determinism flag that is set once the model has read it must not be ignored."""
    recipe = config.load(str(recipe_file))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.run.deterministic = True
