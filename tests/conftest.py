"""Settings of the whole suite."""

import os
import tempfile

from hypothesis import settings

settings.register_profile("suite", deadline=None, max_examples=60)
settings.load_profile("suite")

# Servers that tests start keep their jobs where nobody else's are.
_DATA = tempfile.TemporaryDirectory(prefix="bishop-tests-")
os.environ["BISHOP_DATA"] = _DATA.name
