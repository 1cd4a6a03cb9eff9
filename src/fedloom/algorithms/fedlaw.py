"""FedLAW: the weight of each client and the shrinkage of the average are learned on examples of the server.

Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023, Algorithm 1.

    client i:  w_i <- SGD(w; D_i)                                 upload  w_i - w
    server:    min over a, b of the loss of  w(a, b) = gamma sum_i lambda_i w_i  on batches of the proxy set,
               lambda = softmax(a) from a_i = ln(n_i / sum n),    gamma = e^b from b = 0
               w <- w(a, b)

A step costs one backward pass of the aggregate and two products with the stacked uploads, whatever their number.
Adam changes a logit by about ``server_lr`` in a step: the authors' 20 epochs of two batches at 0.01 change a weight by
e^0.4 at most. To suppress bad clients use server_lr = 0.05 to 0.1 and at least 100 steps.

gamma moves as far. With 1000 examples, 160 steps, it fell to its bound of 0.5 in each of the first rounds of a LeNet
on MNIST (Dirichlet 0.1), until the model was zero. Two seeds of three ended at 10 %; with 40 steps, or gamma fixed at
1, all three learn (``experiments/law_afl/gamma_lenet.toml``).

``param``
    exp      as above. gamma may exceed 1, and does while logits are still short: scaled up in every round, the model
             has a lower loss now, and what clients learn later counts less. A linear head on 128 random features of
             digits (Dirichlet 0.5, 20 rounds) reached 77 %, where FedAvg and exp_cap have 88.
    exp_cap  gamma = e^min(b, 0), at most 1 as LAW-AFL describes it
    quad     lambda_i = u_i^2 / sum u^2, gamma = v^2. The authors start from equal u; here from sqrt(n_i / sum n)
             (``weighting=uniform`` is theirs), so that without epochs it is FedAvg.
    fixed    lambda = softmax(a), and gamma stays at ``shrink``
``shrink_rule``
    law      gamma is learned, together with lambda or (``stage=two_stage``) after it
    grid     lambda is learned with gamma = 1, then the best of six values on the proxy set is used
    ratio    likewise, then gamma = |w| / (|w| + |g| v), g the mean update, v how much updates disagree
    eq5      likewise, then gamma = eta / (E |g_i|^2 + eps) as LAW-AFL prints it, with g_i = grad F_i(w), the full
             gradient of client i at the model that was sent, and eta = ``shrink``. It costs each client one more pass
             over its data and one number to send. It has the unit of 1 / |g|^2 and explodes as gradients become
             short. It is included to be measured; ``ratio`` is what was probably meant.
    eq5_moves  the pseudo-gradient reading: the same with g_i = w - w_i, the client's update, which costs nothing

While gamma is learned it stays in [``shrink_min``, ``shrink_max``]; ``weights/shrink_bounded`` is 1 in rounds in which
it is at one of these bounds. ``ratio`` respects ``shrink_min``, too; the other rules have no bounds.

``freeze_after=1`` learns in the first round that has uploads, and from then on keeps gamma and
lambda_i / lambda0_i of each client that took part; all others are weighted by size. It may be the "static" FedLAW of
LAW-AFL's Table 7.

Privacy: with ``privacy.clip``, ``privacy.mechanism=local`` and ``weighting=uniform`` every client clips its update
and adds noise before the server sees it. What the server then learns from the updates is as private as they are. Noise
in the sum is z S gamma sqrt(sum lambda^2): concentrated weights amplify it.

BatchNorm: while it learns, the server's net sees proxy batches in training mode, as in the authors' code, so that
running statistics do not matter. ``bn`` decides with which statistics the model is evaluated:
    proxy        from the same batches, as often as the server sees them, and from no client; as in the authors' code,
                 except that the weights are the learned ones
    average      the clients' mean by size, as for every other method
    recalibrate  that, followed by one pass over the proxy set
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    Contributes,
    Diagnoses,
    Inbox,
    Nothing,
    OwnStatistics,
    Setup,
    Surveys,
    Traits,
    UsesProxy,
    Work,
    like,
)
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.optim import Optimizer, sgd
from fedloom.core.schema import other_than, over, under, when
from fedloom.core.task import Batch, Task, normalisation
from fedloom.maths.learned_weights import (
    OF_MODELS,
    SERVER_ADAM,
    Bounds,
    ShrinkRule,
    Stack,
    Weighing,
    WeightSettings,
    aggregated,
    check_bounds,
    learn_weights,
    of_kind,
    remembered,
    settings_for,
    shrink_diagnostics,
    squared_gradient,
    with_shrink,
)
from fedloom.maths.proxy_set import ProxyGradient, proxy_epochs, proxy_loss, proxy_statistics

_OPTIMIZERS: dict[str, Optimizer] = {"adam": SERVER_ADAM, "sgd": sgd(momentum=0.9)}

_LEARNS = when(server_epochs=over(0))
_GAMMA_TOO = when(server_epochs=over(0), shrink_rule="law", param=other_than("fixed"))
_GROWS = when(server_epochs=over(0), shrink_rule="law", param=("exp", "quad")) | when(
    server_epochs=over(0), shrink_rule="law", param="exp_cap", shrink=under(1)
)
_BOUNDED = _GAMMA_TOO | when(shrink_rule="ratio")


class Server(NamedTuple):
    w: Tensor  # [P]
    lam: Tensor  # [N] the weight of each client in the last round; 0 if it did not take part
    offsets: Tensor  # [N] ln(lambda_i / n_i's share) when it was last learned; 0 for a client never seen
    shrink: Tensor  # [] gamma of the last round
    learned: Tensor  # [] rounds in which weights were learned


class Moved(NamedTuple):
    dw: Tensor  # [P]
    slope: Tensor  # [1] |grad F_i(w)|^2 over all of the client's data; [0] unless eq. 5 needs it


class FedLAW(Algorithm[Server, Nothing, Moved], Surveys, UsesProxy, OwnStatistics, Diagnoses, Contributes):
    fedavg_when = {"server_epochs": 0}

    server_epochs: NonNegativeInt = Field(20, description="passes over the proxy set in each round; 0 is FedAvg")
    server_lr: Annotated[PositiveFloat, _LEARNS] = Field(
        0.01, description="learning rate of the weights, halved every 20 epochs"
    )
    server_optimizer: Annotated[Literal["adam", "sgd"], _LEARNS] = Field(
        "adam", description="Adam (0.5, 0.999), or SGD with momentum 0.9"
    )
    proxy_batch: Annotated[PositiveInt, _LEARNS] = Field(128, description="examples in a step of the server")
    param: Annotated[Literal["exp", "quad", "exp_cap", "fixed"], when(shrink_rule="law")] = Field(
        "exp", description="what is learned: see above"
    )
    stage: Annotated[Literal["joint", "two_stage"], _GAMMA_TOO] = Field(
        "joint", description="two_stage: half of the epochs for lambda, averaged by SWA, then half for gamma"
    )
    shrink: Annotated[PositiveFloat, when(shrink_rule=other_than("grid", "ratio"))] = Field(
        1.0, description="gamma at the start of each round; param = fixed keeps it; eq5: eta"
    )
    shrink_rule: ShrinkRule = Field("law", description="where gamma comes from: see above")
    shrink_min: Annotated[PositiveFloat, _BOUNDED] = Field(OF_MODELS.low, description="lower bound of gamma")
    shrink_max: Annotated[PositiveFloat, _GROWS] = Field(OF_MODELS.high, description="upper bound of a learned gamma")
    shrink_exclude: tuple[str, ...] = Field(
        (), description="parameters that gamma does not scale: bn (normalisation), bias, or a prefix of names"
    )
    learns_weights: Annotated[bool, _LEARNS] = Field(
        True, description="false: clients are weighted by size, and only gamma is learned"
    )
    freeze_after: Annotated[PositiveInt | None, _LEARNS] = Field(
        None, description="rounds in which weights are learned; later ones keep them; unset: all rounds"
    )
    bn: Literal["proxy", "average", "recalibrate"] = Field("proxy", description="running statistics: see above")
    weighting: Literal["samples", "uniform"] = Field("samples", description="the weights of clients before learning")

    @model_validator(mode="after")
    def _one_gamma(self) -> FedLAW:
        if self.shrink_rule != "law" and self.param == "fixed":
            raise ValueError("shrink_rule and param = 'fixed' both set gamma; keep one of them")
        if self.shrink_rule == "law" and self.param != "fixed":
            check_bounds(self.shrink, of_kind(self.param, self.learning.bounds))
        return self

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(
            self.weighting,
            each_upload=True,
            distinct=True,
            tolerates_noise=True,
        )

    def bind(self, setup: Setup) -> Self:
        shrinking(setup.task, self.shrink_exclude)  # which refuses unknown settings
        return super().bind(setup)

    def init(self, w: Tensor) -> Server:
        none = torch.zeros(len(self.setup.sizes), dtype=torch.float64, device=w.device)
        return Server(w, none, none.clone(), none.new_ones(()), none.new_zeros(()))

    def send(self, server: Server) -> Server:
        nothing = server.lam[:0]
        return Server(server.w, nothing, nothing, nothing, nothing)

    @property
    def surveys(self) -> bool:
        return self.shrink_rule == "eq5"

    @property
    def survey_gradients(self) -> float:
        return float(self.surveys)

    def survey(self, batch: Batch, down: Server, mine: Nothing) -> Tensor:
        """grad F_i(w), once it is divided by the number of examples."""
        return self.task.grad(down.w, batch) * batch.mask.sum()

    def finish(self, x: Tensor, down: Server, mine: Nothing, work: Work) -> tuple[Moved, Nothing]:
        return Moved(x - down.w, squared_gradient(work.survey, work.examples) if self.surveys else down.w[:0]), ()

    def update(self, server: Server, inbox: Inbox[Moved]) -> Server:
        stack, shrinks = Stack(server.w, inbox.uploads.dw), shrinking(self.task, self.shrink_exclude)
        if self.freeze_after is not None and float(server.learned) >= self.freeze_after:
            how = kept_weights(server, inbox)
            after = server._replace(lam=among_all(how.lam, inbox.clients, server.lam))
        else:
            how = self.weighed(stack, inbox, shrinks)
            after = with_learned_weights(server, inbox, how)
        # FedAvg to the bit: its mean is divided once, after the sum.
        plain = server.w + like(inbox.mean.dw, server.w)
        return after._replace(w=plain if self.is_fedavg else aggregated(stack, how, shrinks))

    def statistics(self, before: Tensor, mean: Tensor, server: Server) -> Tensor:
        if self.bn == "average" or self.is_fedavg or not self.task.has_statistics:
            return mean
        passes = max(1, self.server_epochs) if self.bn == "proxy" else 1
        start = before if self.bn == "proxy" else mean
        return proxy_statistics(self.task, self.proxy, server.w, start, self.proxy_batch, passes)

    @property
    def is_fedavg(self) -> bool:
        return not self.server_epochs and self.shrink == 1 and self.shrink_rule == "law"

    def weighed(self, stack: Stack, inbox: Inbox[Moved], shrinks: Tensor | None) -> Weighing:
        """The learned lambda and gamma of this round."""
        epochs = proxy_epochs(self.task, self.proxy, self.server_epochs, self.proxy_batch, inbox.address)
        settings, loss = self.learning, partial(proxy_loss, self.task, self.proxy)
        along, learns = ProxyGradient(self.task, self.proxy), settings_for(self.shrink_rule, settings)
        how = learn_weights(stack, inbox.weights, along, epochs, learns, shrinks, along.recorder).how
        return with_shrink(self.shrink_rule, how, stack, loss, settings, inbox.uploads.slope, shrinks)

    @property
    def learning(self) -> WeightSettings:
        return WeightSettings(
            kind=self.param,
            stage=self.stage,
            lr=self.server_lr,
            optimizer=_OPTIMIZERS[self.server_optimizer],
            shrink=self.shrink,
            learns_weights=self.learns_weights,
            bounds=Bounds(self.shrink_min, self.shrink_max),
        )

    def contributions(self, before: Server, inbox: Inbox[Moved], after: Server) -> Tensor:
        return after.lam[inbox.clients]

    def diagnostics(self, before: Server, inbox: Inbox[Moved], after: Server) -> dict[str, Tensor]:
        return shrink_diagnostics("weights", after.shrink, self.shrink_rule, self.learning)


def kept_weights(server: Server, inbox: Inbox[Any]) -> Weighing:
    """lambda and gamma as learned earlier."""
    lam = inbox.weights * server.offsets[inbox.clients].exp()
    return Weighing(lam / lam.sum(), server.shrink)


def among_all(lam: Tensor, clients: Tensor, like: Tensor) -> Tensor:
    """The weights of these clients among all of them; 0 for clients that did not take part.  ``[N]``"""
    return torch.zeros_like(like).index_copy(0, clients, lam)


def with_learned_weights(server: Server, inbox: Inbox[Any], how: Weighing) -> Server:
    """What the server keeps of the weights that it has learned in a round."""
    lam0 = inbox.weights / inbox.weights.sum()
    offsets = remembered(server.offsets, inbox.clients, how, torch.where(how.lam > 0, lam0, 0.0))
    lam = among_all(how.lam, inbox.clients, server.lam)
    return server._replace(lam=lam, offsets=offsets, shrink=how.shrink, learned=server.learned + 1)


def shrinking(task: Task, exclude: tuple[str, ...]) -> Tensor | None:
    """Where gamma applies ``[P]``; None: everywhere. Frozen layers are not among the parameters."""
    if not exclude:
        return None
    named = {"bn": normalisation(task), "bias": tuple(n for n in task.names if n.endswith("bias"))}
    left = torch.zeros(task.size, dtype=torch.bool, device=task.w0.device)
    for word in exclude:
        found = task.mask(*named.get(word, (word,))).bool() if named.get(word, (word,)) else left
        if word not in named and not bool(found.any()):
            what = f"no parameter has a name that begins with '{word}'"
            raise ConfigError([Fault("algorithm.shrink_exclude", what, nearest(word, [*task.names, "bn", "bias"]))])
        left = left | found
    return ~left
