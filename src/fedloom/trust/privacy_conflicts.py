"""What privacy cannot be combined with: settings, nets and data under which the reported epsilon would be wrong."""

from __future__ import annotations

from typing import Any

from fedloom.algorithm.capabilities import private_sums
from fedloom.core import tree
from fedloom.core.errors import Fault
from fedloom.trust.privacy import Privacy


def privacy_conflicts(how: Privacy, alg: Any, sampling: str, system: Any, rule: str) -> list[Fault]:
    """Settings under which the reported epsilon would be wrong."""
    if not how.on:
        return []
    sums = private_sums(alg)
    both = sums is not None and sums.sends_moves_and_sums
    if both or (how.clip is not None and how.feature_clip is not None):
        return _of_moves_and_means(how, alg, sampling, system)
    if how.feature_clip is not None:
        return _of_sums(how, alg, sampling, system)
    if alg.family in ("gossip", "closed_form") or not alg.traits.communicates:
        return [_no_updates(how, alg)]
    found = [*_of_method(how, alg), *_of_uploads(how, alg), *_of_sampling(sampling), *_of_rule(how, rule)]
    return found + _missing_clients(how, alg, system)


def _no_updates(how: Privacy, alg: Any) -> Fault:
    """``clip`` with a method whose clients send no updates."""
    what = f"covers clients that send updates to a server, which those of {type(alg).__name__} do not"
    local = " and privacy.mechanism=local" if alg.traits.each_upload and how.mechanism != "local" else ""
    hides = private_sums(alg) is not None
    fix = f"set privacy.feature_clip{local} instead" if hides else "leave the section out"
    return Fault("privacy.clip", f"{what} (got {how.clip:g})", fix)


def _reads_uploads(alg: Any, fix: str) -> Fault:
    what = f"'distributed' hides single uploads in their sum, but {type(alg).__name__} reads every one of them"
    return Fault("privacy.mechanism", what, fix)


def _of_method(how: Privacy, alg: Any) -> list[Fault]:
    """Methods that read more than a sum of uploads, or keep more than they send."""
    name, faults, only_sums = type(alg).__name__, [], "use an algorithm that only sums uploads"
    if alg.traits.each_upload and how.mechanism == "distributed":
        faults.append(_reads_uploads(alg, "set privacy.mechanism=local" if alg.traits.tolerates_noise else only_sums))
    elif alg.traits.each_upload and not alg.traits.tolerates_noise:
        what = f"{name} is not linear in its uploads, and how it tolerates their noise is not known"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", only_sums))
    if alg.traits.mirrored:
        what = f"changes what clients of {name} send, but not what they keep, so that server and clients would disagree"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "use an algorithm without such states"))
    return faults


def _of_uploads(how: Privacy, alg: Any) -> list[Fault]:
    """Uploads whose size, weight or norm would reveal something, or does not fit the clip."""
    name, faults = type(alg).__name__, []
    if alg.traits.size_varies:
        what = f"the size of an upload of {name} depends on the client's data, which no noise hides"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "choose another algorithm"))
    if alg.traits.weighs_examples and not alg.traits.equal_if_private:
        what = f"{name} weights clients by their data, which the weights would reveal"
        fix = "set algorithm.weighting=uniform" if alg.traits.has_weighting else "let it weight clients equally"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", fix))
    if alg.traits.unit_uploads and how.clip != 1:
        what = f"uploads of {name} are no longer than 1, since it clips updates by its own rule"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "set privacy.clip=1"))
    return faults


def _of_sampling(sampling: str) -> list[Fault]:
    if sampling in ("uniform", "poisson", "all"):
        return []
    how = "draws clients by how much data they have" if sampling == "proportional" else "may draw clients in any way"
    what = f"'{sampling}' {how}, which is not accounted for"
    return [Fault("cohort.sampling", what, "use poisson, uniform or all")]


def _of_rule(how: Privacy, rule: str) -> list[Fault]:
    if rule == "mean" or how.mechanism != "distributed":
        return []
    what = f"'{rule}' needs every upload, but under privacy.mechanism = 'distributed' there is only their sum"
    return [Fault("aggregation.rule", what, "set privacy.mechanism=local, or rule=mean")]


def _against_noise(how: Privacy, alg: Any) -> list[Fault]:
    """Settings of the algorithm under which noise in sums over examples does not protect them."""
    sums = private_sums(alg)
    if sums is not None:
        return sums.against_noise(how.mechanism == "local")
    what = f"hides examples in sums over them, which clients of {type(alg).__name__} do not send"
    fix = "leave the section out" if alg.family == "closed_form" else "set privacy.clip instead"
    return [Fault("privacy.feature_clip", what, fix)]


def _of_sums(how: Privacy, alg: Any, sampling: str, system: Any) -> list[Fault]:
    """If sums over examples are protected."""
    faults = _against_noise(how, alg)
    if faults or how.mechanism == "local":
        return faults + _missing_clients(how, alg, system)
    if alg.traits.each_upload:
        faults.append(_reads_uploads(alg, "set privacy.mechanism=local"))
    if sampling != "all":
        what = f"clients of other rounds are not in the sum that hides them (got '{sampling}')"
        faults.append(Fault("cohort.sampling", what, "use all, or set privacy.mechanism=local"))
    return faults + _missing_clients(how, alg, system)


def _of_moves_and_means(how: Privacy, alg: Any, sampling: str, system: Any) -> list[Fault]:
    """If model updates and means over examples are both protected."""
    name = type(alg).__name__
    sums = private_sums(alg)
    if sums is None or not sums.sends_moves_and_sums:
        what = f"clip protects clients and feature_clip protects examples, but {name} sends one kind of upload"
        return [Fault("privacy.feature_clip", what, "keep one of them")]
    for key, what in (("clip", "model updates"), ("feature_clip", "sums over examples")):
        if getattr(how, key) is None:
            said = f"is unset, but clients of {name} also send {what}, which it must bound"
            return [Fault(f"privacy.{key}", said, f"set privacy.{key}, too")]
    faults = sums.against_noise(how.mechanism == "local")
    if how.mechanism != "local":
        faults.append(_reads_uploads(alg, "set privacy.mechanism=local"))
    return faults + _of_sampling(sampling) + _missing_clients(how, alg, system)


def _missing_clients(how: Privacy, alg: Any, system: Any) -> list[Fault]:
    """Clients that are drawn but do not send."""
    drop = system.stragglers and (system.policy == "drop" or (system.policy == "auto" and not alg.traits.partial_work))
    given = {"dropout": system.dropout, "stragglers": system.stragglers if drop else 0}
    missing = {k: v for k, v in given.items() if v} if how.mechanism == "distributed" else {}
    what = "a missing client takes its share of the noise with it"
    faults = [
        Fault(f"system.{k}", f"{what} (got {v:g})", "leave it out, or set privacy.mechanism=local")
        for k, v in missing.items()
    ]
    if system.deadline is not None:
        why = f"which clients are late depends on how much data they have (got {system.deadline:g})"
        faults.append(Fault("system.deadline", why, "leave it out"))
    return faults


def privacy_refusals(how: Privacy, upload: Any, travelling: int, clients: int, examples: int) -> list[Fault]:
    """Faults that only the net and the data show: in uploads like this one, and ``travelling`` running statistics."""
    if not how.on:
        return []
    if how.clip is None:  # the algorithm has checked its other uploads
        what = f"{how.delta:g} is too large for {examples} examples: it would allow publishing one of them in full"
        too_large = Fault("privacy.delta", what, f"below {1 / max(examples, 1):.2g}")
        return [too_large] if how.delta * examples >= 1 else []
    faults = []
    if any(not leaf.is_floating_point() for leaf in tree.leaves(upload)):
        what = "an upload of this algorithm contains integers, which noise cannot hide"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "choose another algorithm"))
    if travelling:
        what = f"{travelling} running statistics of BatchNorm are sent in addition to the clipped upload"
        faults.append(Fault("model", what, 'set model.buffers="local", or use a net without BatchNorm'))
    if how.delta > clients**-1.1:
        what = f"{how.delta:g} is too large for {clients} clients: it would allow publishing one of them in full"
        faults.append(Fault("privacy.delta", what, f"at most {clients**-1.1:.2g}"))
    return faults
