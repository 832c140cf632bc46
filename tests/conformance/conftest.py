"""The suite lives in the package; its assertions shall explain themselves all the same."""

import pytest

pytest.register_assert_rewrite("rftstream.testing")
