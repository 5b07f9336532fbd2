"""The first tests of `make test-gpu` run here before they meet a GPU."""

from tests.gpu.test_first import *  # noqa: F403
