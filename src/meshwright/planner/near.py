"""Near: which mesh a step of the search is about."""

from __future__ import annotations

from typing import Any

from meshwright.planner.meshes import Mesh, MeshClass
from meshwright.planner.space import Shape

__all__ = ["mesh_of"]


def mesh_of(arguments: tuple[Any, ...]) -> Mesh:
    """The mesh that a step is about: that of its first argument, or of the first of those."""
    first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
    if isinstance(first, MeshClass):
        return first.at(arguments[1][arguments[2]])
    mesh: Mesh = first.mesh if isinstance(first, Shape) else first
    return mesh
