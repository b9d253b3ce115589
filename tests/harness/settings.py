"""Settings as a test wants them: of the batches that are declared, with what is named changed."""

import json

from forgekeeper import boot


def settings_with(**options):
    """Make them; what is JSON in the environment is a dictionary here."""
    return boot.model()(
        **{name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    )
