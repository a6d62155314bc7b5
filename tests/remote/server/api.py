"""ndif's API with a table of keys in place of its Postgres; all that is done with a key is the package's own code.

NDIF_TEST_KEYS holds it as JSON: key -> its tags. The tag `trusted` lets a request run inside the model's process;
requests of other keys run in the sandbox.
"""

import json
import os

from ndif.common.providers.postgres import PostgresProvider

KEYS = json.loads(os.environ["NDIF_TEST_KEYS"])


async def _rows(query, key):
    tags = KEYS.get(str(key))
    return [{"user_id": 1, "email": None, "user_tag": tag} for tag in tags or [None]] if tags is not None else []


PostgresProvider.enabled = classmethod(lambda cls: True)
PostgresProvider.fetch = classmethod(lambda cls, query, *arguments: _rows(query, *arguments))

from ndif.services.api.app import app  # noqa: E402, F401
