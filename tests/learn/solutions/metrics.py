import json
from pathlib import Path


def exposition(journal: Path, job: str) -> str:
    step = None
    try:
        lines = journal.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ""
    for line in lines:
        event = json.loads(line)
        step = event if event["event"] == "step" else step
    if step is None:
        return ""
    name = job.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    told = [
        "# TYPE job_loss gauge",
        f'job_loss{{job="{name}"}} {step["loss"]}',
        "# TYPE job_tokens_total counter",
        f'job_tokens_total{{job="{name}"}} {step["total_tokens"]}',
        "# TYPE job_stall_seconds gauge",
    ]
    for cause, seconds in step["stalls_s"].items():
        told.append(f'job_stall_seconds{{job="{name}",cause="{cause}"}} {seconds}')
    return "\n".join(told) + "\n"
