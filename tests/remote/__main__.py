"""The remote tests against a real NDIF: make its environment, then run pytest where it can run.

    python -m tests.remote PYTEST_ARGUMENTS...

Where Redis or root cannot be had the tests are skipped and say so; in CI that is an error.
"""

import os
import sys

from tests.remote.install import NotPossible, install


def main(arguments):
    pytest = [sys.executable, "-m", "pytest", "tests/remote", *arguments]
    try:
        install()
    except NotPossible as error:
        if os.environ.get("CI"):
            sys.exit(f"no test server: {error}")
        os.environ["TEST_REMOTE"] = str(error)
    else:
        os.environ["TEST_REMOTE"] = ""
        pytest = [sys.executable, "-m", "tests.remote.namespace", *pytest]
    os.execv(sys.executable, pytest)


if __name__ == "__main__":
    main(sys.argv[1:])
