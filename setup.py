"""Build steps that pyproject.toml cannot express: compiled modules and the packaged manifest.

A module is compiled when a ``NAME.pxd`` with its C types lies next to ``NAME.py``. The Python file stays the only
source: it runs unchanged without the extension, and ships beside it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGES = ("inferencegym", "simulator", "env", "grader", "agents", "server")
MANIFEST = "openenv.yaml"

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


def extensions() -> list[Extension]:
    """One extension per Python module with a type declaration file beside it."""
    found = []
    for package in PACKAGES:
        for declaration in sorted((ROOT / package).rglob("*.pxd")):
            module = declaration.with_suffix(".py").relative_to(ROOT)
            if not (ROOT / module).is_file():
                raise FileNotFoundError(
                    f"{declaration.relative_to(ROOT)} declares types for {module}, which is missing"
                )
            name = ".".join(module.with_suffix("").parts)
            found.append(Extension(name, [module.as_posix()], extra_compile_args=COMPILE_ARGS))
    return found


class BuildWithManifest(build_py):
    """Copies the root's openenv.yaml into the package ``inferencegym``, where OpenEnv's discovery looks for it.

    A symbolic link would do the same in a checkout, but OpenEnv's validator refuses trees with links.
    """

    def run(self) -> None:
        super().run()
        base = ROOT if self.editable_mode else Path(self.build_lib)
        shutil.copyfile(ROOT / MANIFEST, base / "inferencegym" / MANIFEST)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), MANIFEST]  # type: ignore[no-untyped-call]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        packaged = str(Path(self.build_lib) / "inferencegym" / MANIFEST)
        return [*super().get_outputs(include_bytecode), packaged]


def compiled_modules() -> list[Extension]:
    found = extensions()
    if not found:
        return []
    # The generated C files go under build/, away from the sources.
    built: list[Extension] = cythonize(  # type: ignore[no-untyped-call]
        found, build_dir="build/cython", compiler_directives=DIRECTIVES, nthreads=os.cpu_count() or 1
    )
    return built


setup(ext_modules=compiled_modules(), cmdclass={"build_py": BuildWithManifest})
