"""``fedloom check``: the laws that every algorithm obeys."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedloom.cli.options import Json, NoUserCode, refuse_user_code


def check(
    algorithm: Annotated[str, typer.Argument(help="A name, file.py, file.py:Class or package.module:Class.")],
    json_: Json = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Test an algorithm against the laws that every method obeys."""
    from fedloom.algorithm import Algorithm
    from fedloom.algorithm.own_class import refuse_mistakes
    from fedloom.core import usercode
    from fedloom.engine import laws
    from fedloom.runs.find import find_algorithm

    refuse_user_code(no_user_code)
    usercode.vouch(algorithm)
    cls = find_algorithm(algorithm, "algorithm")
    refuse_mistakes(cls, Algorithm)
    verdicts = [(law, laws.verdict(law, cls)) for law in laws.LAWS]
    broken = [law for law, fault in verdicts if fault]
    if json_:
        print(json.dumps({law.__name__: fault or "holds" for law, fault in verdicts}))
    else:
        listed: set[str] = set()
        for law, fault in verdicts:
            words = "for the same reason" if fault in listed else fault.replace("\n", "\n        ")
            print(f"{'BROKEN' if fault else 'holds ':6}  {laws.title(law)}" + (f"\n        {words}" if fault else ""))
            listed |= {fault} if fault else set()
        print(f"\n{len(verdicts) - len(broken)} of {len(verdicts)} laws hold for {algorithm}")
    if broken:
        raise typer.Exit(1)
