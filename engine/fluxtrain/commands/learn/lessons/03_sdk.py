"""Task 3: a client of the tuning service."""

import asyncio
import time
import uuid

import httpx


class Client:
    """Makes jobs and waits for them."""

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key

    def create_job(self, model: str, training_file: str) -> str:
        """POST {base_url}/fine_tuning/jobs with {"model": ..., "training_file": ...}."""
        raise NotImplementedError

    def wait(self, job_id: str, poll_s: float = 0.1) -> str:
        """GET {base_url}/fine_tuning/jobs/{job_id} until the job has ended."""
        raise NotImplementedError

    async def wait_all(self, job_ids: list[str]) -> list[str]:
        """Wait for all of them together; return their statuses in this order."""
        raise NotImplementedError
