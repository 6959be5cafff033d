"""Importing this module hides the plugins of packages that happen to be installed beside this one."""

from inferencegym import plugins

plugins._installed = list  # type: ignore[assignment]  # noqa: SLF001
