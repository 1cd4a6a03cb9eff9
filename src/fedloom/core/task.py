"""A task: a network and its loss, seen as pure functions of one flat parameter vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jvp, vjp

from fedloom.core import rng, tree
from fedloom.core.batch_effects import net_mixes_rows, net_remembers
from fedloom.core.channels_last import ViewsReshape, channels_last, computes_the_same, has_own_code
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.gradient import value_and_gradient
from fedloom.core.lanes.conv import in_lanes
from fedloom.core.objective import CLASSES, Criterion
from fedloom.core.own_line import said
from fedloom.core.replay import Recorder

X = TypeVar("X")
# All parameters in one vector [P], or in consecutive pieces of whole tensors: pieces that are constant are
# then not part of the backward pass.
Weights: TypeAlias = Tensor | tuple[Tensor, ...]
# How exact the arithmetic of local training is: tf32 is float32 with short products, where the device has them;
# bf16 computes the net in 16 bits, while parameters, gradients and updates stay float32.
Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
# Whether steps in lanes run eagerly, are replayed as a CUDA graph, or are compiled first.
Capture: TypeAlias = Literal["eager", "graph", "compiled"]


class Batch(NamedTuple):
    """What one local step sees.

    Attributes:
        x: ``[B, ...]`` inputs, normalised.
        y: ``[B]`` classes, or regression targets.
        mask: ``[B]`` 1 for a real example, 0 for padding.
        key: ``[]`` int64: the randomness of this step; ``fedloom.core.rng.fold`` derives more keys from it.
        progress: ``[]`` in [0, 1): how far into the phase this step is; with ``passes``, ``after`` or ``repeat``, whose
            end is not known before, how far into the pass.
        lr: ``[]`` the local learning rate of this round.
        buffers: ``[Q]`` the running statistics that the net starts this step with.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    key: Tensor
    progress: Tensor
    lr: Tensor
    buffers: Tensor


BATCH_DIMS: Any = Batch(0, 0, 0, 0, 0, None, 0)  # type: ignore[arg-type]  # for vmap: by lane, but for the learning rate


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of a key, so that it is the same in every executor and after a resume."""

    key: Tensor

    def __init__(self, p: float, index: int) -> None:
        super().__init__()
        self.p, self.index = p, index
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        place = torch.arange(x.numel(), device=x.device).view(x.shape)
        keep = rng.unit(rng.fold(self.key, self.index, place)) >= self.p
        return x * keep / (1.0 - self.p)


class Task:
    """``apply``, ``loss`` and ``grad`` of one net at any point ``w`` [P]; the net itself never changes.

    ``lanes`` chooses between torch.func's transforms (which nest in vmap) and plain autograd
    (which costs less when one client trains at a time). Both compute the same function.

    ``frozen`` names parts of the net that are not trained. Their parameters and statistics stay in the net, once for
    all clients, and are neither in ``w`` nor in the buffers; these parts are in evaluation mode during training, too.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        lanes: bool = False,
        shape: tuple[int, ...] | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        net = _with_keyed_dropout(copied(net))
        _refuse_hidden_state(net)
        _refuse_tensors(net)
        _freeze(net, frozen)
        self.lanes, self.shape = lanes, shape
        self.criterion = CLASSES
        self.precision: Precision = "fp32"
        self.capture: Capture = "eager"
        self.channels_last = False  # whether images may lie in memory channels last
        self._reading: AbstractContextManager[Any] = nullcontext()  # of images, by the user's own code
        self._shares: dict[int, float] = {}
        self._frozen = tuple(name.removesuffix(".") for name in frozen)
        self._is_tied = _is_tied(net)
        # Without a gradient, torch computes them by one operation, which it cannot map over clients.
        self._is_recurrent = any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in net.modules())
        self._train, self._eval = copy.deepcopy(net).train(), net.eval()
        for name, part in self._train.named_modules():
            if self._is_frozen(name):
                part.eval()
        self._mixes_rows = net_mixes_rows(self._train, shape)
        self._whole = self._eval  # with the body, also if the inputs are its features
        parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.names = tuple(parameters)
        self._shapes = [p.shape for p in parameters.values()]
        self._sizes = [p.numel() for p in parameters.values()]
        self.w0 = _flat(p.detach() for p in parameters.values())  # [P]
        moving = {n: b for n, b in net.named_buffers() if not self._is_frozen(n)}
        floats = {n: b for n, b in moving.items() if b.is_floating_point()}
        self._buffer_names, self._buffer_shapes = tuple(floats), [b.shape for b in floats.values()]
        self._buffer_sizes = [b.numel() for b in floats.values()]
        self._buffer_types = [b.dtype for b in floats.values()]
        self.buffers0 = _flat(floats.values())  # [Q]
        drops = [n for n, m in net.named_modules() if isinstance(m, KeyedDropout)]
        self._dropouts = [n for n in drops if not self._is_frozen(n)]
        keys = {_key(n) for n in self._dropouts}
        self._counters = [n for n, b in moving.items() if not b.is_floating_point() and n not in keys]

    def _is_frozen(self, name: str) -> bool:
        """Whether the module, parameter or buffer of this name belongs to a frozen part."""
        return any(_within(name, part) for part in self._frozen)

    @property
    def size(self) -> int:
        """P, the number of parameters that are trained."""
        return self.w0.numel()

    @property
    def whole(self) -> int:
        """The number of all parameters of the net, including those that are not trained."""
        return sum(p.numel() for p in self._whole.parameters())

    @property
    def passed(self) -> int:
        """The number of parameters in the forward pass of an example in training."""
        return sum(p.numel() for p in self._train.parameters())

    @property
    def fixed(self) -> list[Tensor]:
        """The tensors of the net that training never changes: frozen parameters and statistics, in order."""
        return [x for name, x in self._whole.state_dict().items() if self._is_frozen(name)]

    @property
    def has_statistics(self) -> bool:
        """Whether examples of one batch influence each other in training, as in BatchNorm."""
        return self.has_batch_norm or self._mixes_rows

    @property
    def has_running_statistics(self) -> bool:
        """Whether it then also keeps statistics of the batches that it has seen, for evaluation."""
        return self.has_statistics and self.buffers0.numel() > 0

    @property
    def mixes_rows_in_evaluation(self) -> bool:
        """Whether the outputs for an example depend on the others that are evaluated with it."""
        return net_mixes_rows(self._eval, self.shape)

    @property
    def remembers(self) -> bool:
        """Whether the net computes with anything else that it keeps from one batch to the next."""
        return net_remembers(self._train, self.shape)

    @property
    def has_batch_norm(self) -> bool:
        layers = self._train.named_modules()
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and not self._is_frozen(n) for n, m in layers)

    @property
    def has_convolutions(self) -> bool:
        return any(isinstance(m, nn.modules.conv._ConvNd) for m in self._train.modules())

    @property
    def has_lstm(self) -> bool:
        return any(isinstance(m, nn.LSTM) for m in self._train.modules())

    def to(
        self, device: torch.device, *, lanes: bool, precision: Precision = "fp32", capture: Capture = "eager"
    ) -> Task:
        """The same task on another device, for another kind of caller."""
        other = copy.copy(self)
        other.lanes, other.precision, other.capture = lanes, precision, capture
        other._train, other._eval = copy.deepcopy(self._train).to(device), copy.deepcopy(self._eval).to(device)
        other._whole = other._eval if self._whole is self._eval else self._whole
        other.w0, other.buffers0 = self.w0.to(device), self.buffers0.to(device)
        other.criterion = _on(self.criterion, device)
        for layer in other._train.modules():
            # BatchNorm takes 16-bit inputs with 32-bit statistics, which then requires 32-bit parameters.
            if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
                for parameter in layer.parameters(recurse=False):
                    if not parameter.requires_grad:
                        parameter.data = other._short(parameter.data)
        other.channels_last = self.has_convolutions and computes_the_same(self._whole, self.shape)
        if other.channels_last:
            if other._whole is other._eval:  # it is passed to users, and stays an ordinary net
                other._whole = copy.deepcopy(other._eval)
            for net in (other._train, other._eval):
                if not lanes:
                    channels_last(net)
                elif device.type == "cuda" or capture != "eager":
                    in_lanes(net)
            if has_own_code(other._whole):
                other._reading = ViewsReshape()
        return other

    @property
    def is_headed(self) -> bool:
        """Whether the whole body is frozen, so that its features of an example are always the same."""
        return self._is_frozen("body") and not any(name.startswith("body.") for name in self.names)

    @property
    def net_class(self) -> type[nn.Module]:
        """The class of the net."""
        return type(self._whole)

    def on_features(self) -> Task:
        """The same task for inputs that are features of the body: what is left of the net is its head.

        For nets that are ``head(body(x))`` with a frozen body. Saved nets are still complete.
        """
        other = copy.copy(self)
        other._train, other._eval = _without_body(self._train), _without_body(self._eval)
        other.shape, other._shares = (self.linear_head.in_features,), {}
        return other

    def learning(self, criterion: Criterion) -> Task:
        """The same task with another loss."""
        other = copy.copy(self)
        other.criterion = criterion
        return other

    def apply(self, w: Weights, x: Tensor, buffers: Tensor) -> Tensor:
        """The logits at ``w`` in evaluation mode.  ``[B, classes]``"""
        held = {**self._unflat(w), **self._unflat_buffers(buffers)}
        return self._called(self._eval, held, x)

    def logits(self, w: Weights, batch: Batch) -> Tensor:
        """The logits at ``w`` in training mode.  ``[B, classes]``"""
        return self._forward(w, batch)[0]

    def loss(self, w: Weights, batch: Batch, *, training: bool = True) -> Tensor:
        """The mean loss of the real examples of ``batch``, in training or in evaluation mode."""
        logits = self.logits(w, batch) if training else self.apply(w, batch.x, batch.buffers)
        each = self.criterion.weighted(self.criterion.each(logits, batch.y), batch.y)
        return (each * batch.mask).sum() / batch.mask.sum().clamp(min=1)

    def loss_and_encoding(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """``loss`` and ``encode`` at ``w`` from one forward pass, where the net calls its ``body`` once."""
        seen: list[Tensor] = []
        hook = self._encoder(frozen=False).register_forward_hook(lambda _layer, _given, out: seen.append(out))
        try:
            loss = self.loss(w, batch)
        finally:
            hook.remove()
        return loss, self._full(seen[0].flatten(1)) if len(seen) == 1 else self.encode(w, batch)

    def encode(self, w: Tensor, batch: Batch, *, frozen: bool = False) -> Tensor:
        """The features of the net's ``body``, in training mode or, if ``frozen``, in evaluation mode."""
        body = self._encoder(frozen=frozen)
        inside = {n.removeprefix("body."): x for n, x in self._held(w, batch).items() if n.startswith("body.")}
        return self._full(self._called(body, inside, self._short(batch.x)).flatten(1))

    def _encoder(self, *, frozen: bool) -> nn.Module:
        body = getattr(self._eval if frozen else self._train, "body", None)
        if not isinstance(body, nn.Module):
            raise ConfigError([Fault("model.kind", "the net has no part called 'body', the encoder", "name it so")])
        if next(self._whole.get_submodule("body").parameters(), None) is None:
            what = "the encoder of this net has no parameters, so comparing its outputs is meaningless"
            raise ConfigError([Fault("model.kind", what, "use a net with a hidden layer, such as mlp")])
        return body

    def features(self, w: Tensor, x: Tensor, buffers: Tensor) -> Tensor:
        """The features of ``x`` in evaluation mode; the net's ``body`` need not have parameters.  ``[B, d]``"""
        body = getattr(self._eval, "body", None)
        if not isinstance(body, nn.Module):
            raise ConfigError([Fault("model.kind", "the net has no part called 'body', the encoder", "name it so")])
        held = {**self._unflat(w), **self._unflat_buffers(buffers)}
        inside = {n.removeprefix("body."): v for n, v in held.items() if n.startswith("body.")}
        return self._called(body, inside, x).flatten(1)

    @property
    def linear_head(self) -> nn.Linear:
        """The net's last layer, which is called ``head`` and is linear: its ``out_features`` are the classes, its
        ``in_features`` those of ``encode``."""
        head = getattr(self._eval, "head", None)
        if not isinstance(head, nn.Linear) or "head.weight" not in self.names:
            what = "the net has no linear layer called 'head' that can be trained, after its 'body'"
            raise ConfigError([Fault("model.kind", what, "name its last layer so")])
        return head

    @property
    def is_head_of_body(self) -> bool:
        """Whether the logits are ``head(body(x))``, as far as one input can tell."""
        if self.shape is None:
            return True
        x = torch.linspace(-1, 1, prod(self.shape), device=self.w0.device).view(1, *self.shape)
        with torch.no_grad():
            logits = self.apply(self.w0, x, self.buffers0)
            own = self.linear_head(self.features(self.w0, x, self.buffers0))
        return bool(torch.allclose(own, logits, rtol=1e-4, atol=1e-4))

    def place(self, name: str) -> slice:
        """The slice of the parameter of this name in the vector of all."""
        at = self.names.index(name)
        first = sum(self._sizes[:at])
        return slice(first, first + self._sizes[at])

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        """The gradient of ``loss`` at ``w``.  ``[P]``"""
        return self.differentiate(lambda v: self.loss(v, batch), w)

    def hvp(self, w: Tensor, batch: Batch, v: Tensor, *, training: bool = True) -> Tensor:
        """The Hessian of ``loss`` at ``w``, times ``v``.  ``[P]``"""
        product: Tensor = jvp(grad(partial(self.loss, batch=batch, training=training)), (w,), (v,))[1]
        return product

    def differentiate(self, f: Callable[[X], Tensor], x: X) -> X:
        """The gradient of the scalar function ``f`` at the tree ``x``."""
        return self.evaluate_and_differentiate(f, x)[1]

    def evaluate_and_differentiate(self, f: Callable[[X], Tensor], x: X) -> tuple[Tensor, X]:
        """The value of the scalar function ``f`` at the tree ``x``, and its gradient."""
        if self.lanes and self.capture == "eager":
            return value_and_gradient(f, x)
        if self.lanes:
            gradient, value = grad_and_value(f)(x)
            return value, gradient
        with torch.enable_grad():
            point = tree.tmap(lambda leaf: leaf.detach().requires_grad_(), x)
            at = f(point)
            found = torch.autograd.grad(at, tree.leaves(point), materialize_grads=True)
        return at.detach(), tree.unflatten(x, found)

    def recorder(self, *constants: Tensor) -> Recorder | None:
        """Where a server's steps on this net are recorded, unless steps are not captured; see ``core.replay``."""
        return None if self.capture == "eager" else Recorder(self, constants)

    def below(self, layers: int | Literal["all", "none"]) -> int:
        """How many parameters are below the top ``layers`` (modules that own parameters), which come last."""
        if layers == "none":
            return self.size
        owners = [name.rpartition(".")[0] for name in self.names]
        every = list(dict.fromkeys(owners))
        top = set(every if layers == "all" else every[-layers:])
        first = next(k for k, owner in enumerate(owners) if owner in top)
        return sum(self._sizes[:first])

    def work_above(self, below: int) -> float:
        """The share of a forward pass's arithmetic that the parameters after the first ``below`` take part in."""
        if below not in self._shares:
            self._shares[below] = self._work_above(below)
        return self._shares[below]

    def _work_above(self, below: int) -> float:
        if self.shape is None or below >= self.size:
            return (self.size - below) / max(self.size, 1)
        first = next(k for k in range(len(self._sizes)) if sum(self._sizes[:k]) >= below)
        top = {name.rpartition(".")[0] for name in self.names[first:]}
        x = torch.zeros(1, *self.shape, device=self.w0.device)
        with torch.no_grad(), self._reading:
            counts, total = _work_of_layers(self._eval, x) or _work_by_torch(self._eval, x)
        return float(sum(n for name, n in counts if name in top) / max(total, 1))

    def statistics(self, w: Tensor, batch: Batch) -> Tensor:
        """The running statistics after the net has seen ``batch`` at ``w``.  ``[Q]``"""
        with torch.no_grad():
            return self._forward(w, batch)[1]

    def mask(self, *prefixes: str) -> Tensor:
        """1 on the parameters whose name starts with one of ``prefixes``, else 0.  ``[P]``"""
        parts = zip(self.names, self._sizes, strict=True)
        return torch.cat([torch.full((n,), float(name.startswith(prefixes))) for name, n in parts]).to(self.w0.device)

    def tensors(self, w: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """The parameters and statistics by name, for ``nn.Module.load_state_dict``."""
        flat = {**self._whole.state_dict(), **self._unflat(w), **self._unflat_buffers(buffers)}
        return {name: value.detach().clone().contiguous() for name, value in flat.items()}

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors in the vector of all parameters, in order."""
        return {name: tuple(shape) for name, shape in zip(self.names, self._shapes, strict=True)}

    @property
    def buffer_layout(self) -> dict[str, tuple[int, ...]]:
        """The same for the vector of running statistics."""
        return {name: tuple(shape) for name, shape in zip(self._buffer_names, self._buffer_shapes, strict=True)}

    def module(self, w: Tensor, buffers: Tensor) -> nn.Module:
        """A plain module in evaluation mode with these parameters."""
        net = copy.deepcopy(self._whole)
        net.load_state_dict(self.tensors(w, buffers), strict=False)
        return net

    def _forward(self, w: Weights, batch: Batch) -> tuple[Tensor, Tensor]:
        held = self._held(w, batch)
        logits = self._called(self._train, held, self._short(batch.x))
        return self._full(logits), _flat(held[n] for n in self._buffer_names) if self._buffer_names else batch.buffers

    def _called(self, net: nn.Module, held: dict[str, Tensor], x: Tensor) -> Tensor:
        """What a part of the net computes with these tensors."""

        def out(held: dict[str, Tensor]) -> Tensor:
            found: Tensor = functional_call(net, held, (x,), tie_weights=self._is_tied)
            return found

        with self._reading:
            if self.lanes and self._is_recurrent and not torch.is_grad_enabled():
                return cast(Tensor, vjp(out, held)[0])
            return out(held)

    def _held(self, w: Weights, batch: Batch) -> dict[str, Tensor]:
        """All tensors of the net during one forward pass."""
        # BatchNorm writes its buffers in place: pass copies, which can be read back.
        buffers = {n: b.clone() for n, b in self._unflat_buffers(batch.buffers).items()}
        counters = {n: self._train.get_buffer(n).clone() for n in self._counters}
        keys = {_key(n): batch.key for n in self._dropouts}
        return {**self._unflat(tree.tmap(self._short, w)), **buffers, **counters, **keys}

    def _short(self, x: Tensor) -> Tensor:
        """The tensors that the net computes with: in 16 bits where that is precise enough."""
        return x.bfloat16() if self.precision == "bf16" else x

    def _full(self, x: Tensor) -> Tensor:
        return x.float() if self.precision == "bf16" else x

    def _unflat(self, w: Weights) -> dict[str, Tensor]:
        if isinstance(w, tuple):
            parts = [
                part for piece, sizes in zip(w, self._sizes_of(w), strict=True) for part in torch.split(piece, sizes)
            ]
        else:
            parts = list(torch.split(w, self._sizes))
        each = zip(self.names, parts, self._shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in each}

    def _sizes_of(self, pieces: tuple[Tensor, ...]) -> list[list[int]]:
        """The sizes of the tensors in each of some consecutive pieces of the parameters."""
        left, found = iter(self._sizes), []
        for piece in pieces:
            sizes: list[int] = []
            while sum(sizes) < piece.shape[-1]:
                sizes.append(next(left))
            assert sum(sizes) == piece.shape[-1], "a piece must consist of whole tensors"
            found.append(sizes)
        return found

    def _unflat_buffers(self, buffers: Tensor) -> dict[str, Tensor]:
        if not self._buffer_names:
            return {}
        parts = torch.split(buffers, self._buffer_sizes)
        each = zip(self._buffer_names, parts, self._buffer_shapes, self._buffer_types, strict=True)
        return {name: part.view(shape).to(kind) for name, part, shape, kind in each}


# Layers without multiplications that count.
_FREE = (nn.Sequential, nn.Flatten, nn.Identity, nn.ReLU, nn.MaxPool2d, KeyedDropout)
Arithmetic: TypeAlias = tuple[list[tuple[str, int]], int]  # that of each part of a net, by its name, and of all


def _work_of_layers(net: nn.Module, x: Tensor) -> Arithmetic | None:
    """What ``_work_by_torch`` counts, in a thousandth of the time; None for a net with layers that are not known here.

    A class of nets that only calls its layers says so by an ``only_calls_layers`` of its own, which is not inherited.
    """
    layers = dict(net.named_modules())
    plain = all(
        type(m) in (nn.Linear, nn.Conv2d, *_FREE) or "only_calls_layers" in vars(type(m)) for m in layers.values()
    )
    if not plain or isinstance(net, nn.Linear | nn.Conv2d):
        return None
    found: list[tuple[str, int]] = []
    hooks = [
        layer.register_forward_hook(
            lambda layer, _given, out, name=name: found.append((name, 2 * out.numel() * layer.weight[0].numel()))
        )
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    try:
        net(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found, sum(n for _, n in found)


def _work_by_torch(net: nn.Module, x: Tensor) -> Arithmetic:
    """The arithmetic of a forward pass by torch's counter, which knows every operation and imports torch's compiler."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        net(x)
    counts = {place: sum(ops.values()) for place, ops in counter.get_flop_counts().items()}
    total = counts.pop("Global")
    # A part that has parameters and parts of its own is counted with these parts, which are counted themselves.
    inner = {place: sum(n for other, n in counts.items() if other.rpartition(".")[0] == place) for place in counts}
    return [(place.partition(".")[2], max(0, n - inner[place])) for place, n in counts.items()], total


def _on(criterion: Criterion, device: torch.device) -> Criterion:
    return criterion if criterion.weights is None else criterion._replace(weights=criterion.weights.to(device))


def _without_body(net: nn.Module) -> nn.Module:
    """A copy of the net that passes on its inputs instead of calling its body, which is not copied."""
    return copy.deepcopy(net, {id(net.body): nn.Identity()})


def _is_tied(net: nn.Module) -> bool:
    """Whether one tensor of the net has two names; only then must torch look for them in every forward pass."""
    named = (net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False))
    every = [id(tensor) for each in named for _, tensor in each]
    return len(set(every)) < len(every)


def _flat(tensors: Any) -> Tensor:
    parts = [t.reshape(-1) for t in tensors]
    return torch.cat(parts) if parts else torch.zeros(0)


def _key(dropout: str) -> str:
    return f"{dropout}.key" if dropout else "key"


def _with_keyed_dropout(net: nn.Module) -> nn.Module:
    """The net with every ``nn.Dropout`` replaced, since torch's own draws from a hidden generator."""
    places = [n for n, m in net.named_modules(remove_duplicate=False) if isinstance(m, nn.Dropout)]
    for index, place in enumerate(places):
        parent_name, _, name = place.rpartition(".")
        drop = net.get_submodule(place)
        if not isinstance(drop, nn.Dropout):  # its parent has several names, and was visited under another
            continue
        if place == "":
            return KeyedDropout(drop.p, index)
        setattr(net.get_submodule(parent_name), name, KeyedDropout(drop.p, index))
    return net


def _within(name: str, part: str) -> bool:
    """Whether this dotted name is ``part`` of a net, or inside it."""
    return name == part or name.startswith(f"{part}.")


def _freeze(net: nn.Module, frozen: Sequence[str]) -> None:
    """Exclude the parameters of these parts from training; refuse unknown names, and freezing everything."""
    at, faults = "model.freeze", []
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    parts = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
    for part in frozen:
        inside = [name for name in names if _within(name, part.removesuffix("."))]
        if not inside:
            exists = part.removesuffix(".") in dict(net.named_modules())
            what = f"'{part}' has no parameters that could be trained" if exists else f"the net has no part '{part}'"
            faults.append(Fault(at, what, "leave it out" if exists else nearest(part, parts)))
        for name in inside:
            net.get_parameter(name).requires_grad_(False)
    if not faults and frozen and not any(p.requires_grad for p in net.parameters()):
        what = f"all {len(names)} parameters of the net would be frozen, so nothing would be trained"
        faults.append(Fault(at, f"{what} (got {list(frozen)})", "leave out the head, as freeze = 'body' does"))
    if faults:
        raise ConfigError(faults)


def copied(net: nn.Module) -> nn.Module:
    """A copy of the user's net, or one fault that says why there is none."""
    try:
        return copy.deepcopy(net)
    except Exception as error:  # whatever the user's net holds
        fix = "compute in forward what depends on parameters; torch.nn.utils.parametrizations.weight_norm can be copied"
        raise ConfigError([Fault("model.kind", f"the net cannot be copied: {said(error)}", fix)]) from error


def _refuse_tensors(net: nn.Module) -> None:
    """Refuse parameters that do not fit into one vector of floats, and tensors that no file of models can hold."""
    sparse = [name for name, x in (*net.named_parameters(), *net.named_buffers()) if x.layout != torch.strided]
    if sparse:
        fix = "keep its indices and values, and make it in forward; or keep it dense"
        raise ConfigError([Fault("model.kind", f"'{sparse[0]}' of the net is sparse", fix)])
    kinds = {p.dtype: f"'{name}' is {p.dtype}" for name, p in net.named_parameters() if p.requires_grad}
    if kinds.keys() not in ({torch.float32}, {torch.float64}, set()):
        fix = "call net.float() at the end of __init__; for 16 bits there is engine.precision=bf16"
        if any(kind.is_complex for kind in kinds):
            fix = "a complex one can be torch.view_as_complex(p.clone()), of a real parameter p [..., 2]"
        what = f"parameters of the net are neither all float32 nor all float64: {', '.join(kinds.values())}"
        raise ConfigError([Fault("model.kind", what.replace("torch.", ""), fix)])


def _refuse_hidden_state(net: nn.Module) -> None:
    """Refuse layers with hidden random or counting state: a resumed run would differ."""
    faults = []
    for name, layer in net.named_modules():
        drops = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        draws = drops or isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d)
        inner = isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0
        if draws or inner:
            what = f"{type(layer).__name__} at '{name}' draws from torch's hidden generator"
            instead = "set dropout=0 there, and put one before or after it" if inner else "use it"
            faults.append(Fault("model.kind", what, f"nn.Dropout is the dropout that can be repeated: {instead}"))
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            what = f"{type(layer).__name__} at '{name}' has max_norm, and so writes into its weights"
            faults.append(Fault("model.kind", what, "leave it out, and shorten long rows in forward"))
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
            what = f"{type(layer).__name__} at '{name}' has no momentum, and so counts batches across clients"
            faults.append(Fault("model.kind", what, "give it one, such as momentum=0.1"))
    if faults:
        raise ConfigError(faults)


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def normalisation(task: Task) -> tuple[str, ...]:
    """The prefixes of the names of parameters in normalisation layers."""
    layers = task.module(task.w0, task.buffers0).named_modules()
    return tuple(f"{name}." for name, layer in layers if isinstance(layer, _NORMS))
