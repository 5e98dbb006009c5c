"""A folder is a layer: it imports only from the layers before it in ORDER, and no file is longer than 400 lines."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = [
    "forge_megatron.rules",
    "forge_megatron.formats",
    "forge_megatron.kernels",
    "forge_megatron.linear",
    "forge_megatron.vocab",
    "forge_megatron.coordinator",
    "forge_megatron.coverage",
    "forge_megatron.groups",
    "forge_megatron.codes",
    "forge_megatron.hidden",
    "forge_megatron.random_bits",
    "forge_megatron.replaced",
    "forge_megatron.parameters",
    "forge_megatron.blocks_of_shards",
    "forge_megatron.marker",
    "forge_megatron.state",
    "forge_megatron.reports",
    "forge_megatron.ranks",
    "forge_megatron.stepping",
    "forge_megatron.discarding",
    "forge_megatron.capture",
    "forge_megatron.tuning",
    "forge_megatron.optimizer",
    "forge_megatron.wrapped",
    "forge_megatron.attach",
    "forge_megatron",
    "forge_megatron.megatron",
    "forge_megatron.integrations",
    "launch",
    "recipes",
    "gates",
    "slurm",
    "tests",
]
OURS = ("forge_megatron", "launch", "recipes", "gates", "slurm", "tests")
MOST_LINES = 400


def sources() -> list[Path]:
    return sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, at any depth: a lazy import is an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + base.split(".") * bool(base))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def layer(module: str) -> str | None:
    """The layer that a dotted name belongs to, None for other people's packages."""
    parts = module.split(".")
    if parts[0] not in OURS:
        return None
    if parts[0] == "forge_megatron" and ".".join(parts[:2]) in ORDER:
        return ".".join(parts[:2])
    return parts[0]


def violations(source: str, module: str, is_package: bool) -> list[str]:
    own = layer(module)
    found = []
    for line, name in imports(ast.parse(source), module, is_package):
        theirs = layer(name)
        if theirs is not None and ORDER.index(theirs) > ORDER.index(own):
            found.append(f"{module}:{line} ({own}) imports {name} ({theirs}), which comes after it")
    return found


def test_a_folder_imports_only_from_the_layers_before_it():
    found = []
    for path in sources():
        found += violations(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py")
    assert not found, "\n".join(found)


def test_every_module_of_the_package_has_a_place_in_the_order():
    children = {f"forge_megatron.{path.stem}" for path in (ROOT / "forge_megatron").glob("*.py")}
    children |= {f"forge_megatron.{path.parent.name}" for path in (ROOT / "forge_megatron").glob("*/__init__.py")}
    assert children - {"forge_megatron.__init__"} <= set(ORDER)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("forge_megatron.rules.rule", "from forge_megatron.linear import ticket"),
        ("forge_megatron.rules.rule", "def f():\n    import forge_megatron.optimizer"),
        ("forge_megatron.kernels.wgrad", "from ..attach import attach"),
        ("forge_megatron.linear.owned", "from forge_megatron import attach"),
        ("forge_megatron.linear.owned", "import forge_megatron"),
        ("launch.trainer", "from gates import receipt"),
        ("gates.tp", "import tests.oracles"),
    ],
)
def test_the_check_sees_an_import_from_below(module: str, source: str):
    assert len(violations(source, module, is_package=False)) == 1


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_has_at_most_400_lines(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
