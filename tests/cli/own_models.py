"""Models of a user's own, as a file beside the tests names them: `own_models.py:build`."""

import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + down


class Net(nn.Module):
    def __init__(self, depth: int = 5, inner: int = 23) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(10, inner) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


class Attention(nn.Module):
    """Eight heads of two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 8, 2
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))


def build() -> nn.Module:
    return Net()


def mixed() -> nn.Module:
    """Blocks of two widths."""
    net = Net(depth=4)
    net.layers[2] = Mlp(10, 12)
    return net


def eight_heads() -> nn.Module:
    return nn.Sequential(Attention(), Attention())


def fails() -> nn.Module:
    raise RuntimeError("no such table")


def number() -> int:
    return 3
