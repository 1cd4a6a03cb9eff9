"""Pure operations on trees: a tree is a tensor, or a (named) tuple of trees; ``()`` is the empty one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def tmap(f: Callable[..., Tensor], tree: T, *rest: Any) -> T:
    """Apply ``f`` leaf by leaf; the result has the structure of ``tree``."""
    if isinstance(tree, Tensor):
        return cast(T, f(tree, *rest))
    if isinstance(tree, tuple):
        return rebuild(tree, [tmap(f, *parts) for parts in zip(tree, *rest, strict=True)])
    raise TypeError(f"the leaves of a tree are tensors (got {type(tree).__name__})")


def rebuild(like: T, kids: Iterable[Any]) -> T:
    """A tuple of the same type as ``like``, with other children."""
    make: Any = getattr(type(like), "_make", tuple)
    return cast(T, make(kids))


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of ``tree``, from left to right."""
    return [tree] if isinstance(tree, Tensor) else [leaf for kid in tree for leaf in leaves(kid)]


def named_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The leaves with their path, such as ``memory.m`` or ``0``; a bare tensor is called ``value``."""
    if isinstance(tree, Tensor):
        yield prefix or "value", tree
        return
    fields = getattr(tree, "_fields", range(len(tree)))
    for field, kid in zip(fields, tree, strict=True):
        yield from named_leaves(kid, f"{prefix}.{field}" if prefix else str(field))


def unflatten(like: T, tensors: Iterable[Tensor]) -> T:
    """The tree with the structure of ``like`` and these leaves."""
    supply = iter(tensors)
    return tmap(lambda _: next(supply), like)


def stack(trees: list[T]) -> T:
    """Trees of one structure, stacked along a new first axis."""
    return tmap(lambda *xs: torch.stack(xs), trees[0], *trees[1:])


def cat(trees: list[T]) -> T:
    """Stacked trees, joined along their first axis."""
    return trees[0] if len(trees) == 1 else tmap(lambda *xs: torch.cat(xs), trees[0], *trees[1:])


def take(tree: T, rows: Any) -> T:
    """These rows (a slice, an index or a tensor of indices) of a stacked tree."""
    return tmap(lambda x: x[rows], tree)


def on_device(tree: T, device: torch.device) -> T:
    """The tree on a device; the copy to a GPU is asynchronous."""

    def one(x: Tensor) -> Tensor:
        if device.type == "cuda" and x.device.type == "cpu":
            return x.pin_memory().to(device, non_blocking=True)
        return x.to(device)

    return tmap(one, tree)


def where(keep: Tensor, a: T, b: T) -> T:
    """``a`` where ``keep`` [K], else ``b``, row by row."""
    return tmap(lambda x, y: torch.where(keep.view(-1, *[1] * (x.dim() - 1)), x, y), a, b)


def nbytes(tree: Any) -> int:
    """How many bytes the leaves take."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


# Enough columns to keep the CPU busy, few enough that a float64 block stays in its cache.
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 22}


def mix(rows: Tensor, tree: T) -> T:
    """``[R, K] @ [K, ...]`` on every leaf, summed in float64: the only reduction in fedloom."""
    weights = rows.double()

    def one(x: Tensor) -> Tensor:
        flat = x.reshape(len(x), math.prod(x.shape[1:]))  # -1 fails if there are no rows
        out = torch.empty(len(weights), flat.shape[1], dtype=torch.float64, device=x.device)
        wide = max(1, _BLOCK.get(x.device.type, flat.numel()) // max(len(x), 1))
        for lo in range(0, flat.shape[1], wide):
            torch.matmul(weights, flat[:, lo : lo + wide].double(), out=out[:, lo : lo + wide])
        return out.view(len(weights), *x.shape[1:])

    return tmap(one, tree)


def finite_rows(tree: Any, count: int) -> Tensor:
    """Which of ``count`` stacked rows are finite in every leaf.  ``[K]``

    A sum is finite only if all its terms are, and is far cheaper than a mask of every element; only
    if it is not finite (which a sum of huge finite numbers can be, too) is each element checked.
    """
    ok = torch.ones(count, dtype=torch.bool)
    for leaf in leaves(tree):
        if leaf.is_floating_point():
            ok = ok.to(leaf.device)
            flat = leaf.reshape(count, math.prod(leaf.shape[1:]))
            good = flat.sum(1).isfinite()
            if not bool(good.all()):
                good = flat.isfinite().all(1)
            ok = ok & good
    return ok
