"""Log lines of the tests' own process: by default structlog lets rich draw each trace, which takes seconds."""

import structlog


def plain() -> None:
    """Write lines as structlog does by default, and traces as Python does."""
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])
