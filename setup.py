"""Build steps that pyproject.toml cannot express: one published package, compiled modules, the packaged manifest.

In a clone the rooms (``simulator``, ``env``, ``grader``, ``agents``, ``live``, ``server``) are folders beside
``inferencegym``, imported by these names. As top-level packages of an installed distribution they would overwrite those
of others, so a wheel holds them inside: ``inferencegym.simulator`` and so on. The build copies them there and writes
the longer name wherever a source names a room's module. An editable install and ``build_ext --inplace`` leave the
clone's names.

A module is compiled when a ``NAME.pxd`` with its C types lies next to ``NAME.py``. The Python file stays the only
source: it runs unchanged without the extension, and ships beside it. Where a wheel is built without a C compiler the
modules stay interpreted, with ``inferencegym.plain_cython`` where Cython is not installed either, and the command line
says so; a build in a clone fails instead.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
PACKAGE = "inferencegym"
ROOMS = ("simulator", "env", "grader", "agents", "live", "server")
MANIFEST = "openenv.yaml"
# What a build leaves beside the sources.
GENERATED = {".c", ".so", ".pyd", ".pyc"}

# Fused multiply-add exists on some processors only, so a contracted product rounds differently there. Without
# contraction, -ffast-math and -march=native, compiled code rounds as plain Python does, on every processor.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "-g0"]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "infer_types": True,
    # Annotations are for readers and type checkers; C types come from the .pxd alone.
    "annotation_typing": False,
}

# --- Names ---------------------------------------------------------------------------------------------------------

IMPORT = re.compile(rf"\bfrom (?=(?:{'|'.join(ROOMS)})(?:\.\w+)* c?import\b)")
"""``from env.batch import ...`` and the ``cimport`` of declaration files, also in examples and in programs as text."""
MENTION = re.compile(rf"(?:(?<=[\"'`])|(?<=-m )|(?<=app: ))(?=({'|'.join(ROOMS)})\.(\w+))")
"""A dotted name at the start of a string or of a quoted word, after ``python -m``, and as the manifests' ``app``."""
CYTHON = re.compile(r"^import cython$", re.MULTILINE)
WITHOUT_CYTHON = (
    f"try:\n    import cython\nexcept ModuleNotFoundError:\n    from {PACKAGE} import plain_cython as cython"
)
DECLARATION = re.compile(rf"^\s*(?:from|cimport|import)\s+(?:{'|'.join(ROOMS)})\b.*", re.MULTILINE)


def published_name(name: str) -> str:
    """Where a wheel holds a package or module of the clone."""
    return f"{PACKAGE}.{name}" if name.partition(".")[0] in ROOMS else name


def published_source(text: str) -> str:
    """The text with the published names of the rooms' modules. A name that is no module of a room stays."""
    text = CYTHON.sub(WITHOUT_CYTHON, text)
    text = IMPORT.sub(f"from {PACKAGE}.", text)
    return MENTION.sub(lambda found: f"{PACKAGE}." if _is_module(found[1], found[2]) else "", text)


def _is_module(room: str, name: str) -> bool:
    return (ROOT / room / f"{name}.py").is_file() or (ROOT / room / name / "__init__.py").is_file()


def check_published(path: Path) -> None:
    """Raise SyntaxError if a published source still imports a room by its name in the clone."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        left = [ast.unparse(node) for node in ast.walk(ast.parse(text)) if set(_imported(node)) & set(ROOMS)]
    else:
        left = DECLARATION.findall(text)
    if left:
        found = left[0].strip()
        raise SyntaxError(
            f"{path}: {found!r} has no form that the wheel's build rewrites; write `from ROOM import ...`"
        )


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield (node.module or "").partition(".")[0]


# --- What is built -------------------------------------------------------------------------------------------------


def packages() -> list[str]:
    """All packages by their names in the clone."""
    roots = (PACKAGE, *ROOMS)
    return find_packages(str(ROOT), include=[*roots, *(f"{root}.*" for root in roots)])


def extensions(published: bool) -> list[Extension]:
    """One extension per Python module with a type declaration file beside it."""
    found = []
    for root in (PACKAGE, *ROOMS):
        for declaration in sorted((ROOT / root).rglob("*.pxd")):
            source = declaration.with_suffix(".py").relative_to(ROOT)
            if not (ROOT / source).is_file():
                raise FileNotFoundError(
                    f"{declaration.relative_to(ROOT)} declares types for {source}, which is missing"
                )
            name = ".".join(source.with_suffix("").parts)
            found.append(
                Extension(
                    published_name(name) if published else name,
                    [source.as_posix()],
                    extra_compile_args=COMPILE_ARGS,
                    # Whoever installs a wheel may have no compiler; whoever builds in a clone asked for one.
                    optional=published,
                )
            )
    return found


class BuildSources(build_py):
    """Copies packages, their data files and the root's openenv.yaml, which OpenEnv looks for in the package.

    A symbolic link to the manifest would do in a checkout, but OpenEnv's validator refuses trees with links.
    """

    def run(self) -> None:
        if self.editable_mode:
            shutil.copyfile(ROOT / MANIFEST, ROOT / PACKAGE / MANIFEST)
            return
        for room in ROOMS:
            if (ROOT / PACKAGE / room).exists() or (ROOT / PACKAGE / f"{room}.py").exists():
                raise FileExistsError(f"{PACKAGE}/{room} stands where the wheel holds the room {room}: rename it")
        # A wheel packs all that lies there, so nothing of an earlier build may.
        for root in (PACKAGE, *ROOMS):
            shutil.rmtree(Path(self.build_lib) / root, ignore_errors=True)
        super().run()
        built = Path(self.build_lib) / PACKAGE
        shutil.copyfile(ROOT / MANIFEST, built / MANIFEST)
        for path in sorted(built.rglob("*")):
            if path.suffix in {".py", ".pxd", ".yaml"}:
                path.write_text(published_source(path.read_text(encoding="utf-8")), encoding="utf-8")
            if path.suffix in {".py", ".pxd"}:
                check_published(path)

    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        """Everything in a package that is neither a module nor left by a build."""
        return [str(path) for path in sorted(Path(src_dir).rglob("*")) if _is_data_of(Path(src_dir), path)]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), MANIFEST]  # type: ignore[no-untyped-call]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        packaged = str(Path(self.build_lib) / PACKAGE / MANIFEST)
        return [*super().get_outputs(include_bytecode), packaged]


def _is_data_of(package: Path, path: Path) -> bool:
    if not path.is_file() or path.suffix in GENERATED or (package / MANIFEST) == path:
        return False
    owner = next(folder for folder in path.parents if folder == package or (folder / "__init__.py").is_file())
    return owner == package and not (path.suffix == ".py" and path.parent == package)


class BuildExtensions(build_ext):
    """Translates and compiles: the clone's sources for use in place, the published ones for a wheel."""

    def finalize_options(self) -> None:
        self.in_clone = bool(self.inplace or self.editable_mode)
        self.distribution.ext_modules = list(extensions(published=not self.in_clone))
        super().finalize_options()

    def run(self) -> None:
        if not self.in_clone:
            self.run_command("build_py")
        super().run()

    def build_extensions(self) -> None:
        from Cython.Build import cythonize

        if not self.in_clone:
            for extension in self.extensions:
                extension.sources = [str(Path(self.build_lib, *extension.name.split(".")).with_suffix(".py"))]
        # The generated C files go under build/, away from the sources.
        translated = cythonize(  # type: ignore[no-untyped-call]
            self.extensions, build_dir="build/cython", compiler_directives=DIRECTIVES, nthreads=os.cpu_count() or 1
        )
        sources = {extension.name: extension.sources for extension in translated}
        for extension in self.extensions:
            extension.sources = sources[extension.name]
        super().build_extensions()


class EditableInstall(editable_wheel):
    """Installs the clone as it stands: the rooms are top-level packages there."""

    def finalize_options(self) -> None:
        self.distribution.packages = packages()
        self.distribution.package_dir = {}
        super().finalize_options()


if __name__ == "__main__":
    setup(
        packages=[published_name(name) for name in packages()],
        package_dir={published_name(room): room for room in ROOMS},
        ext_modules=extensions(published=True),
        cmdclass={"build_py": BuildSources, "build_ext": BuildExtensions, "editable_wheel": EditableInstall},
    )
