"""Build steps that pyproject.toml cannot express: one published package, compiled modules, the packaged manifest.

In a clone the rooms (:data:`ROOMS`) are folders beside ``inferencegym``, imported by these names. As top-level
packages of an installed distribution they would overwrite those of others, so a wheel holds them inside:
``inferencegym.simulator`` and so on. The build copies them there and writes the longer name wherever a source names a
room's module. An editable install and ``build_ext --inplace`` leave the clone's names.

A module is compiled when a ``NAME.pxd`` with its C types lies next to ``NAME.py``, together with the modules beside it
whose names it imports only where it is not compiled (:func:`whole_source`). The Python files stay the only source: they
run unchanged without the extension, and ship beside it. Where a wheel is built without a C compiler the
modules stay interpreted, and the command line says so; a build in a clone fails instead.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
PACKAGE = "inferencegym"
ROOMS = ("simulator", "env", "grader", "agents", "ops", "live", "server", "cli")
MANIFEST = "openenv.yaml"
# What a build leaves beside the sources.
GENERATED = {".c", ".so", ".pyd", ".pyc"}

# Fused multiply-add exists on some processors only, so a contracted product rounds differently there. Without
# contraction, -ffast-math and -march=native, compiled code rounds as plain Python does, on every processor.
#
# The kernel is many small functions; GCC inlines too few of them with its own limit of 30 instructions.
COMPILE_ARGS = ["-O3", "-ffp-contract=off", "--param=max-inline-insns-auto=300", "-g0"]
# They make views of arrays; what a step computes is in the other modules.
UTILITIES_ARGS = ["-O1", "-g0"]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "infer_types": True,
    # Annotations are for readers and type checkers; C types come from the .pxd alone.
    "annotation_typing": False,
    # Environments copy and pickle themselves by replay; pickling each class would be a third of the compiled code.
    "auto_pickle": False,
}

# The code of memory views that all compiled modules need, translated and compiled once.
UTILITIES = f"{PACKAGE}.cython_utilities"

# --- Names ---------------------------------------------------------------------------------------------------------

IMPORT = re.compile(rf"\bfrom (?=(?:{'|'.join(ROOMS)})(?:\.\w+)* c?import\b)")
"""``from env.batch import ...`` and the ``cimport`` of declaration files, also in examples and in programs as text."""
MENTION = re.compile(rf"(?:(?<=[\"'`])|(?<=-m )|(?<=app: ))(?=({'|'.join(ROOMS)})\.(\w+))")
"""A dotted name at the start of a string or of a quoted word, after ``python -m``, and as the manifests' ``app``."""
PLAIN_CYTHON = f"from {PACKAGE} import plain_cython as cython"
"""What the sources import, so that they run where Cython is not installed; the compiler reads ``import cython``."""
DECLARATION = re.compile(rf"^\s*(?:from|cimport|import)\s+(?:{'|'.join(ROOMS)})\b.*", re.MULTILINE)


def published_name(name: str) -> str:
    """Where a wheel holds a package or module of the clone."""
    return f"{PACKAGE}.{name}" if name.partition(".")[0] in ROOMS else name


def published_source(text: str) -> str:
    """The text with the published names of the rooms' modules. A name that is no module of a room stays."""
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
    """One extension per Python module with a type declaration file beside it, and the code that they share."""
    # Whoever installs a wheel may have no compiler; whoever builds in a clone asked for one.
    extension = partial(Extension, extra_compile_args=COMPILE_ARGS, optional=published)
    utilities = f"build/cython/{UTILITIES.replace('.', '/')}.c"
    found = [extension(UTILITIES, [utilities], extra_compile_args=UTILITIES_ARGS)]
    for root in (PACKAGE, *ROOMS):
        for declaration in sorted((ROOT / root).rglob("*.pxd")):
            source = declaration.with_suffix(".py").relative_to(ROOT)
            if not (ROOT / source).is_file():
                raise FileNotFoundError(
                    f"{declaration.relative_to(ROOT)} declares types for {source}, which is missing"
                )
            name = ".".join(source.with_suffix("").parts)
            found.append(extension(published_name(name) if published else name, [source.as_posix()]))
    return found


def parts(source: Path) -> list[Path]:
    """The modules that are compiled into one: those beside it that it imports ``if not cython.compiled``, and itself.

    One C file holds them all, so that the C compiler inlines calls between them.
    """
    found: list[Path] = []
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if _is_for_python(node):
            names = [item.module for item in ast.walk(node) if isinstance(item, ast.ImportFrom) and item.module]
            beside = [source.with_name(f"{name.rpartition('.')[2]}.py") for name in names]
            found += [part for path in beside if path.is_file() for part in parts(path)]
    return list(dict.fromkeys([*found, source]))


def whole_source(source: Path) -> str:
    """The text of a compiled module's :func:`parts`, without what they import from each other."""
    texts = ["from __future__ import annotations"]
    for path in parts(source):
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if not _is_for_python(node) and "__future__" not in _imported(node):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                texts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n".join(texts).replace(PLAIN_CYTHON, "import cython") + "\n"


def _is_for_python(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "not cython.compiled"


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
            if path.suffix in {".py", ".pxd", ".yaml", ".md"}:
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
    if not path.is_file() or path.suffix in GENERATED or (package.name, path) == (PACKAGE, package / MANIFEST):
        return False
    owner = next(folder for folder in path.parents if folder == package or (folder / "__init__.py").is_file())
    return owner == package and not (path.suffix == ".py" and path.parent == package)


class BuildExtensions(build_ext):
    """Translates and compiles: the clone's sources for use in place, the published ones for a wheel."""

    def finalize_options(self) -> None:
        self.in_clone = bool(self.inplace or self.editable_mode)
        self.distribution.ext_modules = list(extensions(published=not self.in_clone))
        super().finalize_options()
        self.parallel = os.cpu_count()

    def run(self) -> None:
        if not self.in_clone:
            self.run_command("build_py")
        super().run()

    def build_extensions(self) -> None:
        from Cython.Build import cythonize

        for extension in self.extensions:
            if extension.name == UTILITIES:
                continue
            path = Path(*extension.name.split(".")).with_suffix(".py")
            extension.sources = [str(self._translated(path if self.in_clone else Path(self.build_lib, path), path))]
        translated = cythonize(  # type: ignore[no-untyped-call]
            self.extensions,
            include_path=["build/cython"],  # declarations are looked up by a module's full name
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=UTILITIES,
            nthreads=os.cpu_count() or 1,
        )
        sources = {extension.name: extension.sources for extension in translated}
        for extension in self.extensions:
            extension.sources = sources[extension.name]
        super().build_extensions()

    def _translated(self, source: Path, name: Path) -> Path:
        """What Cython reads, under build/: the whole source and its declarations, written where they have changed."""
        target = Path("build/cython", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        declared = source.with_suffix(".pxd").read_text(encoding="utf-8")
        for path, text in ((target, whole_source(source)), (target.with_suffix(".pxd"), declared)):
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
        return target


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
