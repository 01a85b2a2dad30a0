"""The life of a run: inputs, plan, session, steps, requests, evaluation."""
