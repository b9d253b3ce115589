"""Settings for tests, with options changed."""

import json
import os
from functools import lru_cache

from forgekeeper.delivery import boot
from forgekeeper.platform.settings import PREFIX


def settings_with(**options):
    """Return settings with these *options*; a setting that is JSON in the environment is a dictionary here."""
    given = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    return _made(boot.settings_class(), tuple(given.items()), tuple(sorted(environment.items())))


@lru_cache(maxsize=100)
def _made(model, given, _environment):
    """Cache settings: creating them takes as long as ten queries to a server, and nothing changes them."""
    return model(**dict(given))
