"""LeNet and its namesakes."""

from __future__ import annotations

from typing import ClassVar

from fedloom.models.cnn import conv_net
from fedloom.models.net import Net, NetSpec


class LeNet5(NetSpec):
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling: 6 and 16 channels, then 120 and 84 features.

    It was drawn for 32x32, so smaller images are padded by 2 on each side (28x28 becomes exactly that).
    """

    kind: ClassVar[str] = "lenet5"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        border = 2 if min(shape[1:], default=0) < 32 else 0
        return conv_net(self.kind, shape, classes, channels=(6, 16), borders=(border, 0), widths=(120, 84))


class LawLeNet(NetSpec):
    """The LeNet of FedLAW: 16 and 32 padded channels, and no hidden layer."""

    kind: ClassVar[str] = "lenet_law"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        return conv_net(self.kind, shape, classes, channels=(16, 32), borders=(2, 2), widths=())
