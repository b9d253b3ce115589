"""Settings as a test wants them: of the batches that are declared, with what is named changed."""

import json
import os
from functools import lru_cache

from forgekeeper.delivery import boot
from forgekeeper.platform.settings import PREFIX


def settings_with(**options):
    """Make them; what is JSON in the environment is a dictionary here."""
    given = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    return _made(boot.settings_class(), tuple(given.items()), tuple(sorted(environment.items())))


@lru_cache(maxsize=100)
def _made(model, given, _environment):
    """Make them once: that takes as long as ten questions to a server, and nothing changes them."""
    return model(**dict(given))
