"""The proxy set: its batches have an address."""

from __future__ import annotations

import torch

from fedloom.maths.proxy_set import proxy_batches


def test_batches_have_an_address() -> None:
    one = proxy_batches(10, 4, 0, 3, 1)
    assert [len(b) for b in one] == [4, 4, 2]
    assert sorted(torch.cat(one).tolist()) == list(range(10))
    assert all(torch.equal(a, b) for a, b in zip(one, proxy_batches(10, 4, 0, 3, 1), strict=True))
    assert not torch.equal(torch.cat(one), torch.cat(proxy_batches(10, 4, 0, 3, 2)))
