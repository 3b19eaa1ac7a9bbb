"""The build backend: setuptools, with the packages found instead of typed.

The repository is the package, so that setuptools' own finder, which names a package by its folder, would install `hooks`,
`probe` and `analyses` as packages of their own. Here every folder with an `__init__.py` becomes `advantage_probe.<folder>`.
"""

from __future__ import annotations

import setuptools
from setuptools import find_packages
from setuptools.build_meta import _BuildMetaBackend

NAME = "advantage_probe"
ROOMS = ("hooks", "probe", "analyses")


def packages(root: str = ".") -> list[str]:
    """The import names of every package below `root`."""
    below = [f"{NAME}.{name}" for name in find_packages(root) if name.split(".")[0] in ROOMS]
    return [NAME, *sorted(below)]


class _Backend(_BuildMetaBackend):
    def run_setup(self, setup_script: str = "setup.py") -> None:
        setuptools.setup(packages=packages())


_backend = _Backend()
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
build_editable = _backend.build_editable
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
