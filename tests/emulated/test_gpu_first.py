"""What `make test-gpu` opens with runs here before it meets a GPU."""

from test_gpu_first import *  # noqa: F403
