"""``fedloom watch``: the page of results, live on this machine while runs and comparisons are running."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

from fedloom.cli.options import PageLanguage
from fedloom.core.errors import ConfigError, Fault, FedloomError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address is a secret
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN|COMPARISON|FOLDER", help="A run, a comparison, or a folder.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 0,
    host: Annotated[str, typer.Option(help="The address to listen on; by default only this machine can connect.")] = (
        "127.0.0.1"
    ),
    lang: PageLanguage = "en",
) -> None:
    """Serve the page of results, live, while runs are running.

    It shows progress, the time left and growing curves. It only reads.

    The address has a secret random part; keep it to yourself.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError([Fault("fedloom watch", "needs a server library", "pip install 'fedloom[watch]'")]) from error
    if not folder.is_dir():
        raise ConfigError([Fault(str(folder), "there is no such folder", "see fedloom show runs/")])
    token = secrets.token_urlsafe(16)
    quiet = {"log_level": "error", "access_log": False, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(application(folder, token, host, lang), host=host, port=port, **quiet)
    try:
        opened = config.bind_socket()
    except SystemExit as error:
        raise ConfigError([Fault("--port", f"{host}:{port} cannot be used", "choose another, or 0")]) from error
    opened.listen()  # the page can be opened as soon as the address is printed
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{opened.getsockname()[1]}/{token}/   live page of {folder}; Ctrl-C ends it", flush=True)
    uvicorn.Server(config).run(sockets=[opened])


def application(folder: Path, token: str, host: str, language: Literal["en", "zh"]) -> Starlette:
    """The server: one page, for anyone who knows its address."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.routing import Route

    def shown(request: Request) -> Response:
        from fedloom.compare.look import look_at
        from fedloom.report.page.render import page

        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return PlainTextResponse("not found", 404, _HEADERS)
        try:
            return HTMLResponse(page(look_at([folder]), language, live=True), headers=_HEADERS)
        except FedloomError as error:  # such as a folder in which no run has started
            return PlainTextResponse(f"{error}\n", 503, {**_HEADERS, "Refresh": "2"})

    # A page of another site cannot reach it under another host name.
    names = [host, "127.0.0.1", "localhost"] if host not in ("0.0.0.0", "::") else ["*"]
    guard: Any = Middleware(TrustedHostMiddleware, allowed_hosts=names)
    return Starlette(routes=[Route("/{token}/", shown, methods=["GET"])], middleware=[guard])


S = TypeVar("S")


class Watched:
    """A screen that also serves the live page, in a separate process, as soon as there is a folder."""

    def __init__(self, screen: Any) -> None:
        self._screen = screen
        self._server: subprocess.Popen[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)

    def started(self, what: Any, folder: Path | None, *rest: Any) -> None:
        self._screen.started(what, folder, *rest)
        if folder is not None:
            from fedloom.runs.launch import PARENT

            command = [sys.executable, "-m", "fedloom", "watch", str(folder)]
            world = {**os.environ, PARENT: str(os.getpid())}  # it ends when this process ends for any reason
            self._server = subprocess.Popen(command, stdout=sys.stderr.fileno(), env=world, start_new_session=True)

    def end(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


@contextmanager
def watched(screen: S, wanted: bool) -> Iterator[S]:
    """The same screen, with the live page if requested."""
    if not wanted:
        yield screen
        return
    both = Watched(screen)
    try:
        yield cast(S, both)  # it passes everything else on
    finally:
        both.end()
