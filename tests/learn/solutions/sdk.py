import asyncio
import time
import uuid

import httpx

TRIES = 5


class Client:
    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def create_job(self, model: str, training_file: str) -> str:
        headers = {**self._headers(), "Idempotency-Key": str(uuid.uuid4())}
        body = {"model": model, "training_file": training_file}
        for left in reversed(range(TRIES)):
            try:
                answer = httpx.post(f"{self.base_url}/fine_tuning/jobs", headers=headers, json=body)
            except httpx.TransportError:
                if not left:
                    raise
                continue
            if answer.status_code in (429, 503) and left:
                time.sleep(float(answer.headers.get("Retry-After", 1)))
                continue
            if answer.is_error:
                raise RuntimeError(answer.json()["error"]["message"])
            return answer.json()["id"]
        raise AssertionError

    def wait(self, job_id: str, poll_s: float = 0.1) -> str:
        return asyncio.run(self._wait(job_id, poll_s))

    async def _wait(self, job_id: str, poll_s: float) -> str:
        async with httpx.AsyncClient(headers=self._headers()) as client:
            while True:
                answer = await client.get(f"{self.base_url}/fine_tuning/jobs/{job_id}")
                status = answer.json()["status"]
                if status in ("succeeded", "failed", "cancelled"):
                    return status
                await asyncio.sleep(poll_s)

    async def wait_all(self, job_ids: list[str]) -> list[str]:
        return await asyncio.gather(*(self._wait(one, 0.1) for one in job_ids))
