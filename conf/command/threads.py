"""How threads that wait for each other spend the time."""

import os


def rest_while_waiting() -> None:
    """Has waiting threads sleep, unless the environment says otherwise; before torch is imported.

    They would spin for some milliseconds, which other processes, and the very threads that they
    wait for, then lack: products of two threads beside busy ones took four times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
