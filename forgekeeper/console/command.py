"""The command `console`: a page to look at, and to act on."""

from __future__ import annotations

import typer

from forgekeeper.cli.connection import configured, recorded
from forgekeeper.cli.terminal import Problem, err, wrong_use
from forgekeeper.connections import Limits, connect
from forgekeeper.settings import PREFIX

console = typer.Typer(name="console", help="Serve a page that shows what the commands say, and acts as they do.")
LACKING = "this needs the extra `console`: pip install 'forgekeeper[console]'"


@console.callback(invoke_without_command=True)
def serve(context: typer.Context) -> None:
    """Serve a page that shows what the commands say, and acts as they do.

    It listens on FORGEKEEPER_CONSOLE_HOST and FORGEKEEPER_CONSOLE_PORT.  SIGTERM and Ctrl-C end it.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        import uvicorn

        from forgekeeper.console.app import application
    except ImportError as missing:
        raise Problem(f"{LACKING} ({missing})") from None
    settings = configured()
    if not settings.console_port:
        wrong_use(f"{PREFIX}CONSOLE_PORT is 0: a console without a port has nothing to do")
    connect(settings, Limits.of_scheduler(settings), name="console", connections=8)
    with recorded(settings):
        err.print(f"the console is at http://{settings.console_host}:{settings.console_port}/")
        uvicorn.run(
            application(settings),
            host=settings.console_host,
            port=settings.console_port,
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=2,
        )
