"""What `make test-gpu` opens with runs here before it meets a GPU."""

from tests.gpu.test_first import *  # noqa: F403
