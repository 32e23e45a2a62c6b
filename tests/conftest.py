"""What every test runs under: repeatable property tests, no network, and few threads."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before anything imports a hub client: a test that would download must fail at once, not hang.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "thorough",
    max_examples=2000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYBRIDKV_TEST_PROFILE", "ci"))


def pytest_configure() -> None:
    """Share the cores out to the xdist workers: torch alone would start one thread per core in each."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = str(max(1, min(4, (os.cpu_count() or 1) // workers)))
    # Read by OpenMP when torch is first imported, so that tests of the core need not import torch.
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
