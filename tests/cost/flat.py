"""Models of which only the parameters cost anything, for tests of model states."""

from __future__ import annotations

from meshwright.spec import BlockSpec, Layout, ModelSpec

__all__ = ["flat_model"]


def flat_model(*, root: int, layer: int, layers: int) -> ModelSpec:
    """A root unit of `root` elements (all of the embedding) and `layers` blocks of `layer` elements, no activations."""

    def block(name: str, kind: str, parameters: int) -> BlockSpec:
        return BlockSpec(
            name=name,
            kind=kind,  # type: ignore[arg-type]  # one of the three kinds
            parameters=parameters,
            tensors=((parameters,),) if parameters else (),
            forward_flops=0,
            moved_bytes=0,
            saved_bytes={"none": 0, "selective": 0, "full": 0},
            output_bytes=0,
        )

    blocks = [block("embedding", "embedding", root), *(block(f"layers.{i}", "layer", layer) for i in range(layers))]
    return ModelSpec(name="flat", layout=Layout(sequence=1), blocks=(*blocks, block("head", "head", 0)))
