"""A board for Grafana and alert rules for Prometheus, made of the table of metrics."""

from __future__ import annotations

from typing import Any

from fluxtrain.serve import metrics as of

_SHOWN = '{project=~"$project",job_id=~"$job"}'
_PROJECT = '{project=~"$project"}'
_WIDTH, _HEIGHT = 8, 7  # of a panel, of 24 columns

# Title, unit, and pairs of an expression and its legend.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Jobs", "short", ((f"sum by (state) ({of.JOBS}{_PROJECT})", "{{state}}"),)),
    ("Oldest job that waits", "s", ((f"{of.OLDEST}{_PROJECT}", "{{project}}"),)),
    ("Ended in the last day", "short",
     ((f"sum by (how) (increase({of.ENDED}{_PROJECT}[1d]))", "{{how}}"),)),
    ("Progress", "percentunit", ((f"{of.STEP}{_SHOWN} / {of.STEPS}{_SHOWN}", "{{job_id}}"),)),
    ("Loss", "short", ((f"{of.LOSS}{_SHOWN}", "{{job_id}}"),)),
    ("Gradient norm", "short", ((f"{of.NORM}{_SHOWN}", "{{job_id}}"),)),
    ("Step", "s", ((f"{of.STEP_S}{_SHOWN}", "{{job_id}}"),)),
    ("Phases of a step", "s", ((f"sum by (phase) ({of.PHASE_S}{_SHOWN})", "{{phase}}"),)),
    ("Waiting in a step", "s", ((f"sum by (cause) ({of.STALL_S}{_SHOWN})", "{{cause}}"),)),
    ("Tokens", "short",
     ((f"{of.SPEED}{_SHOWN}", "{{job_id}}"),
      (f"rate({of.TOKENS}{_SHOWN}[5m])", "{{job_id}}, 5 min"))),
    ("Memory of the device", "bytes",
     ((f"sum by (card, category) ({of.DEVICE}{_SHOWN})", "{{card}} {{category}}"),)),
    ("Memory of the host", "bytes",
     ((f"sum by (category) ({of.HOST}{_SHOWN})", "{{category}}"),)),
    ("Bus and disk", "Bps",
     ((f"sum by (card, direction) (rate({of.MOVED}{_SHOWN}[1m]))", "{{card}} {{direction}}"),)),
    ("Plan against measurement", "percentunit",
     ((f"{of.PLAN_ERROR}{_SHOWN}", "{{job_id}} {{quantity}}"),)),
    ("Age of the newest checkpoint", "s", ((f"{of.CHECKPOINT_AGE}{_SHOWN}", "{{job_id}}"),)),
    ("Silence of trainers", "s", ((f"{of.SILENT}{_SHOWN}", "{{job_id}}"),)),
    ("Questions", "short",
     ((f"sum by (how) (rate({of.ANSWERS}{_PROJECT}[5m]))", "{{how}} a second"),
      (f"sum({of.ANSWER_ROWS}{_PROJECT})", "now"))),
    ("Wait for an answer, 95 of 100", "s",
     ((f"histogram_quantile(0.95, sum by (le) (rate({of.ANSWER_WAIT}{_PROJECT}[5m])))", "wait"),)),
    ("Tokens of answers", "short",
     ((f"sum by (kind) (rate({of.ANSWER_TOKENS}{_PROJECT}[5m]))", "{{kind}} a second"),)),
    ("Quotas", "percentunit", ((f"{of.QUOTA}{_PROJECT}", "{{project}} {{quota}}"),)),
    ("Free space", "percentunit", ((f"{of.DISK_FREE} / {of.DISK_SIZE}", "{{place}}"),)),
    ("Cards put aside, queue", "short",
     ((f"{of.PUT_ASIDE}", "card {{card}}"), (f"{of.QUEUE_ALIVE}", "queue alive"))),
)  # fmt: skip

# Name, expression, how long it must hold, severity, and what is told.
ALERTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("FluxTrainDown", f"absent({of.QUEUE_ALIVE}) or {of.QUEUE_ALIVE} == 0", "2m", "critical",
     "The service does not answer, or looks after no jobs: read its log and start it again"),
    ("FluxTrainJobFailed", f'increase({of.ENDED}{{how="failed"}}[15m]) > 0', "0m", "warning",
     "A job of {{ $labels.project }} failed: its error is in GET /v1/fine_tuning/jobs/ID"),
    ("FluxTrainJobDiverged", f'increase({of.ENDED}{{how="diverged"}}[15m]) > 0', "0m", "warning",
     "A job of {{ $labels.project }} diverged: train again with a lower learning rate"),
    ("FluxTrainJobStalled", f"{of.SILENT} > 120", "2m", "critical",
     "The trainer of {{ $labels.job_id }} has written nothing for {{ $value | humanizeDuration }}"),
    ("FluxTrainQueueLong", f"{of.OLDEST} > 6 * 3600", "5m", "warning",
     "A job of {{ $labels.project }} has waited for {{ $value | humanizeDuration }}"),
    ("FluxTrainCardPutAside", f"{of.PUT_ASIDE} == 1", "5m", "critical",
     "Card {{ $labels.card }} failed and gets no jobs until `fluxtrain doctor` passes"),
    ("FluxTrainDiskLow", f"{of.DISK_FREE} / {of.DISK_SIZE} < 0.1", "5m", "warning",
     "The disk of the {{ $labels.place }} has {{ $value | humanizePercentage }} left"),
    ("FluxTrainQuotaUsed", f'{of.QUOTA}{{quota!="tokens_per_minute"}} > 0.9', "5m", "info",
     "{{ $labels.project }} uses {{ $value | humanizePercentage }} of {{ $labels.quota }}"),
)  # fmt: skip


def alert_rules() -> dict[str, Any]:
    """Return the rules as Prometheus' rule file has them."""
    rules = [
        {
            "alert": name,
            "expr": expression,
            "for": lasting,
            "labels": {"severity": severity},
            "annotations": {"summary": told},
        }
        for name, expression, lasting, severity, told in ALERTS
    ]
    return {"groups": [{"name": "fluxtrain", "rules": rules}]}


def board() -> dict[str, Any]:
    """Return the board as Grafana imports it; its data source is a variable."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {
                "x": number * _WIDTH % 24,
                "y": number * _WIDTH // 24 * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [
                {"refId": chr(65 + at), "expr": expression, "legendFormat": legend}
                for at, (expression, legend) in enumerate(targets)
            ],
        }
        for number, (title, unit, targets) in enumerate(PANELS)
    ]
    asked = {"type": "query", "datasource": source, "multi": True, "includeAll": True, "refresh": 2}
    every = {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {"name": "project", "query": f"label_values({of.JOBS}, project)", **asked, **every},
        {"name": "job", "query": f"label_values({of.STEP}{_PROJECT}, job_id)", **asked, **every},
    ]
    return {
        "title": "FluxTrain",
        "uid": "fluxtrain",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
