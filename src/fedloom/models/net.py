"""What every net has in common: a ``body`` that computes features and a linear ``head`` that computes logits.

Parameters are drawn from torch's default generator, so the caller's seed determines them. Layers are initialised
as in PyTorch, except that the convolutions of the deep nets follow He et al. (2015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.hidden_random import hidden_generators
from fedloom.core.own_line import said
from fedloom.core.schema import GIVEN, Kind, when
from fedloom.core.task import Batch, Task

_TRIED = 2  # rows of the batch that a net is tried on: BatchNorm refuses one alone


class Net(nn.Module):
    """Logits ``[B, classes]`` by ``head(body(x))``; parameter names begin with ``body.`` or ``head.``."""

    only_calls_layers: ClassVar[bool] = True  # and computes nothing else

    def __init__(self, body: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class NetSpec(Kind):
    """A net by name, with its settings; it adapts to the shape of the data."""

    projection: NonNegativeInt = Field(
        0, description="width of a projection head after the body, as in MOON's paper (256); 0: none"
    )
    weights: str = Field(
        "", description="a safetensors file to start from, such as a run's model.safetensors; it may lack the head"
    )

    weights_part: Annotated[Literal["all", "body"], when(weights=GIVEN)] = Field(
        "all", description="what to load from weights; body leaves the head out, as for data with other classes"
    )
    freeze: tuple[str, ...] = Field(
        (), description="parts of the net that are not trained, such as 'body' or ['body.conv1', 'body.conv2']"
    )

    def net(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The net that is trained: the result of ``build``, with the projection head and the weights of the
        settings."""
        net = self._projected(materialised(self.build(shape, classes), shape), classes)
        if self.weights:
            start_from(net, self.weights, headless=self.weights_part == "body")
        return net

    def task(self, shape: tuple[int, ...], classes: int) -> Task:
        """The same as a task, whose frozen parts are not trained."""
        return Task(self.net(shape, classes), shape=shape, frozen=self.freeze)

    def _projected(self, net: nn.Module, classes: int) -> nn.Module:
        if not self.projection:
            return net
        if not isinstance(net, Net):
            raise ConfigError([Fault("model.projection", f"is for fedloom's own nets (got {type(net).__name__})")])
        wide = net.head.in_features
        project = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, self.projection))
        return Net(nn.Sequential(net.body, project), self.projection, classes)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A freshly initialised net for float32 inputs ``[B, *shape]``, with children ``body`` and ``head``."""
        raise NotImplementedError


class NormedSpec(NetSpec):
    """A deep net whose normalisation is a choice.

    ``group`` keeps no statistics, so clients share only parameters; ``batch`` has running statistics, which are
    averaged or kept by each client (``buffers``); ``none`` gives every convolution a bias instead.
    Group and batch normalisation have equally many parameters.
    """

    norm: Literal["group", "batch", "none"] = Field("group", description="the normalisation of each layer")
    groups: Annotated[PositiveInt, when(norm="group")] = Field(
        2, description="most groups of a layer; it takes the most that leave two channels each"
    )
    buffers: Annotated[Literal["average", "local"], when(norm="batch")] = Field(
        "average", description="running statistics of BatchNorm: averaged by the server, or kept by each client"
    )

    def normal(self, channels: int) -> nn.Module:
        """The normalisation of one layer."""
        if self.norm == "none":
            return nn.Identity()
        if self.norm == "batch":
            return nn.BatchNorm2d(channels)
        # a group of one channel would be constant, and so useless, where a stage has shrunk to one pixel
        fits = [n for n in range(2, self.groups + 1) if channels % n == 0 and channels // n >= 2]
        return nn.GroupNorm(max(fits, default=1), channels)

    def conv(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        """A convolution that keeps the size (divided by ``stride``); the normalisation has the bias."""
        layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=self.norm == "none")
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return layer

    def unit(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
        """A convolution and its normalisation."""
        return nn.Sequential(self.conv(inputs, outputs, kernel, stride), self.normal(outputs))


class GlobalMean(nn.Module):
    """The mean of each channel over the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def hidden(body: nn.Sequential, inputs: int, widths: tuple[int, ...]) -> int:
    """Adds fully connected layers with ReLU to ``body`` and returns the number of features."""
    for i, width in enumerate(widths, 1):
        body.add_module(f"fc{i}", nn.Sequential(nn.Linear(inputs, width), nn.ReLU()))
        inputs = width
    return inputs


def image(kind: str, shape: tuple[int, ...], least: int, fix: str = "") -> tuple[int, int, int]:
    """``shape`` as channels, height and width, or one fault that says what ``kind`` needs and which nets fit."""
    got = "x".join(map(str, shape))
    if len(shape) != 3:
        what = f"{kind} needs images of channels x height x width (got shape {got})"
        raise ConfigError([Fault("model.kind", what, "logistic and mlp take any shape")])
    channels, height, width = shape
    if min(height, width) < least:
        fits = "logistic, mlp and resnet20 work" if min(height, width) >= 3 else "logistic and mlp work"
        what = f"{kind} needs images of at least {least}x{least} (got {got})"
        raise ConfigError([Fault("model.kind", what, f"{fits} there" + (f"; so does {fix}" if fix else ""))])
    return channels, height, width


def start_from(net: nn.Module, path: str, *, headless: bool = False) -> None:
    """Load the tensors of a safetensors file into the net; all must fit, and only those of a head may be missing.

    ``headless``: leave out the head that is in the file.
    """
    at = "model.weights"
    try:
        given = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError([Fault(at, f"{path}: not readable as safetensors: {error}")]) from error
    if headless:
        given = {name: x for name, x in given.items() if not name.startswith("head.")}
    own = net.state_dict()
    faults = [
        Fault(at, f"{path} has '{n}', which the net does not have", nearest(n, own)) for n in given if n not in own
    ]
    faults += [fault for n, x in own.items() if n in given and (fault := _misfit(n, given[n], x, path)) is not None]
    missing = [n for n in own if n not in given and not n.startswith("head.")]
    faults += [Fault(at, f"{path} lacks '{missing[0]}' and {len(missing) - 1} more of the net")] if missing else []
    if faults:
        raise ConfigError(faults)
    net.load_state_dict(given, strict=False)


def _misfit(name: str, given: Tensor, own: Tensor, path: str) -> Fault | None:
    """Why a tensor of the file cannot replace the net's; None if it can."""
    at = "model.weights"
    if given.shape != own.shape:
        fix = "model.weights_part=body leaves it out" if name.startswith("head.") else ""
        return Fault(at, f"'{name}' is {_size(given)} in {path}, {_size(own)} in the net", fix)
    if given.is_floating_point() != own.is_floating_point():
        kinds = [str(x.dtype).removeprefix("torch.") for x in (given, own)]
        return Fault(at, f"'{name}' is of {kinds[0]} in {path}, of {kinds[1]} in the net")
    if not bool(given.to(own.dtype).isfinite().all()):
        return Fault(at, f"'{name}' in {path} has numbers that are not finite, as {own.dtype}".replace("torch.", ""))
    return None


def _size(x: Tensor) -> str:
    return "x".join(map(str, x.shape)) or "a number"


def materialised(net: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The net; where layers wait for their first input, as LazyLinear does, they have seen one of this shape."""
    if any(map(is_lazy, (*net.parameters(), *net.buffers()))):
        training, x = net.training, torch.zeros(_TRIED, *shape)
        with torch.no_grad():
            _tried(lambda: net.eval()(x), f" for inputs of shape {list(x.shape)}", "")
        net.train(training)
    return net


def refuse_misfit(task: Task, shape: tuple[int, ...], outputs: int, *, descends: bool = True) -> None:
    """One fault for a net that fails on inputs of this shape, or does not return ``[B, outputs]`` for them.

    So is one that no seed and no resume could repeat: it draws from a hidden generator, remembers earlier batches, or
    writes into what it is given. It is tried in evaluation, in training and, if training ``descends``, backwards.
    Pass a task of its own: what the user's code changes in the net stays.
    """
    device = task.w0.device
    x, one = torch.zeros(_TRIED, *shape, device=device), torch.ones((), device=device)
    w = torch.cat([task.w0[:1], task.w0])[1:]  # as of any client: it begins somewhere in memory
    batch = Batch(x, x.new_zeros(_TRIED), x.new_ones(_TRIED), one.long(), one, one, task.buffers0.clone())
    batch = batch if task.criterion.regression else batch._replace(y=batch.y.long())
    passes: dict[str, Callable[[], Any]] = {
        "": lambda: task.apply(w, x, batch.buffers),
        " in training": lambda: task.logits(w, batch),
    }
    each = "one number for each row" if task.criterion.regression else f"one output for each of the {outputs} classes"
    fix = f"it should return [batch, {outputs}], {each}"
    # Where the user's code draws random numbers, those of the run stay what they are.
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for mode, forward in passes.items():
            given = f"{mode} for inputs of shape {list(x.shape)}"
            before = hidden_generators(device)
            found = _tried(forward, given, fix)
            if not isinstance(found, Tensor) or found.shape != (_TRIED, outputs) or not found.is_floating_point():
                raise ConfigError([Fault("model", f"the net returns {_described(found)}{given}", fix)])
            drawn = [whose for whose, state in hidden_generators(device).items() if state != before[whose]]
            if drawn:
                what = f"the forward pass of the net draws from {drawn[0]} hidden generator{mode}"
                known = "an nn.Dropout layer draws by the run's seed; F.dropout and torch.randn do not"
                raise ConfigError([Fault("model", f"{what}, so that no seed could repeat a run", known)])
            _refuse_writing(task, w, batch, mode)
        if task.remembers:
            what = "a batch changes what the net computes for later ones: it keeps something, such as an attribute or a"
            kept = "what register_buffer keeps in floats is a running statistic, and is sent"
            raise ConfigError([Fault("model", f"{what} counter, that no client sends", kept)])
        if descends:
            _tried(lambda: task.grad(w, batch), " in the backward pass", "")


def _refuse_writing(task: Task, w: Tensor, batch: Batch, mode: str) -> None:
    """One fault for a net that changes in place what it is given."""
    given = {
        "parameters": (w, task.w0, "compute with others, as in F.linear(x, self.layer.weight.clamp(-1, 1))"),
        "buffers": (batch.buffers, task.buffers0, "keep statistics only if self.training"),
        "inputs": (batch.x, torch.zeros_like(batch.x), "begin with x = x.clone()"),
    }
    for what, (now, then, fix) in given.items():
        if now._version or not torch.equal(now, then):
            raise ConfigError([Fault("model", f"the forward pass of the net writes into its {what}{mode}", fix)])


def _tried(forward: Callable[[], Any], given: str, fix: str) -> Any:
    """What a forward pass returns; one fault if it fails."""
    try:
        return forward()
    except Exception as error:  # whatever the user's own net does
        raise ConfigError([Fault("model", f"the net fails{given}: {said(error)}", _remedy(error) or fix)]) from error


def _remedy(error: Exception) -> str:
    """What to do about an error of torch that does not say so; mostly empty."""
    if "scalar types: Long, Int" in str(error) or "tensors used as indices must be" in str(error):
        return "inputs reach a net as float32: write x.long() where they are numbers of words or rows"
    if "divisible by 2" in str(error):
        return "parameters begin anywhere in memory: write torch.view_as_complex(p.clone())"
    if "BFloat16" in str(error):
        return "engine.precision=bf16 computes it in 16 bits, which it does not take; fp32 and tf32 do not"
    if "sparse" in str(error):
        return "gradients are dense here: leave out sparse=True"
    return ""


def _described(found: Any) -> str:
    """What a net returned, in words."""
    if isinstance(found, Tensor):
        return f"{list(found.shape)}" + ("" if found.is_floating_point() else f" of {found.dtype}")
    inside = f" of {', '.join(map(_described, found))}" if isinstance(found, tuple | list) else ""
    return f"a {type(found).__name__}{inside}"


def parameters(net: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)
