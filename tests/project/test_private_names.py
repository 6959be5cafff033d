"""No private name of another package is used: such names may change with any release.

Ruff's SLF001 finds ``thing._name``; these tests find inherited names and imports, which it does not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

from inferencegym.client import InferenceGymEnv
from inferencegym.client.openenv_types import without_gradio
from tests.servers import ROOT

with without_gradio():
    from openenv.core import EnvClient

PACKAGES = ("inferencegym", "simulator", "env", "grader", "agents", "ops", "live", "server", "cli")
FOLDERS = (*PACKAGES, "scripts", "benchmarks", "tests")

HOOKS = {
    # Abstract in OpenEnv: every client defines them.
    "EnvClient": {"_step_payload", "_parse_result", "_parse_state"},
    # OpenEnv's docstrings tell subclasses to call them in `reset` and `step`.
    "Environment": {"_apply_rubric", "_reset_rubric"},
    # Stable-Baselines3 documents these five as the ones to override.
    "BaseCallback": {"_on_training_start", "_on_rollout_start", "_on_step", "_on_rollout_end", "_on_training_end"},
}
"""Names with an underscore that a package asks its users to override or to call."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def modules() -> Iterator[ModuleType]:
    """Every module of the packages, except those whose extra is not installed."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield root
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            try:
                yield importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] in PACKAGES:
                    raise


def ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in PACKAGES


@cache
def private_names_in(kind: type) -> set[str]:
    """Names with an underscore that a class defines, or uses on itself or on ``super()``."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):
        return set()  # compiled, or made by a function such as pydantic's create_model
    assert isinstance(body, ast.ClassDef)
    found = {node.name for node in body.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
            found.add(node.attr)
    for statement in body.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)}


def private_names_of_others(kind: type) -> set[str]:
    """Names with an underscore that a class inherits from other packages, their hooks excepted."""
    found: set[str] = set()
    hooks: set[str] = set()
    for base in kind.__mro__[1:]:
        if ours(base) or base.__module__ in ("builtins", "typing"):
            continue
        hooks |= HOOKS.get(base.__name__, set())
        found |= {name for name in vars(base) if is_private(name)}
        found |= private_names_in(base)
    return found - hooks


def test_no_class_overrides_or_uses_a_private_name_of_the_class_that_it_extends() -> None:
    taken: dict[str, set[str]] = {}
    checked: set[str] = set()
    for module in modules():
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__ or not is_extension(kind):
                continue
            checked.add(kind.__name__)
            names = private_names_in(kind) & private_names_of_others(kind)
            if names:
                taken[f"{kind.__module__}.{kind.__qualname__}"] = names
    assert taken == {}
    assert {"EpisodeClient", "InferenceGymEnv", "Settings"} <= checked


def is_extension(kind: type) -> bool:
    return any(not ours(base) and base.__module__ not in ("builtins", "typing", "abc") for base in kind.__mro__[1:])


def test_openenvs_client_is_extended_by_its_public_methods_and_three_hooks() -> None:
    changed = {name for kind in InferenceGymEnv.__mro__ if ours(kind) for name in vars(kind)} & set(vars(EnvClient))
    assert {name for name in changed if is_private(name)} - {"_abc_impl"} == HOOKS["EnvClient"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_or_name_with_an_underscore_is_imported_from_another_package(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                whole = [alias.name for alias in node.names]
            else:
                continue
            # Tests use only public names of our own packages, too.
            own = () if folder == "tests" else FOLDERS
            others = [name for name in whole if name.split(".")[0] not in own]
            found += [f"{path.name}: {name}" for name in others if any(map(is_private, name.split(".")))]
    assert found == []
